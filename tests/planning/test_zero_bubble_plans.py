"""Plans for zb-h1 and zb-v: closed forms, where the search takes them, and where it does not."""

import json
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli import main
from penstock.planning import plan
from penstock.planning.memory import chunks_in_flight, peak_bytes
from penstock.planning.pipedream.partitions import find_pipedream
from penstock.planning.predictions import foresee, slowest_part
from penstock.planning.requests import Request
from penstock.planning.stage_costs import chain_costs
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.verifier import verify
from penstock.simulating import evaluate, simulate
from penstock.values import Cluster, LayerProfile, Plan, Profile, Stage

LAYER = LayerProfile("", 1.0, 2.0, 0, 10, 100, weight_seconds=1.0)
EQUAL = Profile((LAYER,) * 8, microbatch_size=5)
FOUR = Cluster.uniform(4, 1e9)
WORK = 8 * 2 * 3.0
"""Of a rank: eight microbatches through two layers."""


@pytest.mark.parametrize("planner", ["pipedream", "uniform"])
@pytest.mark.parametrize(("schedule", "per_rank", "bubble"), [("zb-h1", 1, 3 * 2.0), ("zb-v", 2, 3 * 1.0)])
def test_equal_stages_take_the_closed_form_of_the_schedule(
    planner: str, schedule: str, per_rank: int, bubble: float
) -> None:
    made = plan(EQUAL, FOUR, planner=planner, schedule=schedule, microbatches=8, stages=4 * per_rank)

    assert made.stages_per_rank == per_rank
    assert [stage.ranks for stage in made.stages] == [(rank,) for rank in (0, 1, 2, 3, 3, 2, 1, 0)[: 4 * per_rank]]
    # Each weight part takes a third of a millisecond more.
    assert made.predicted.minibatch_seconds == pytest.approx(WORK + bubble, abs=8 * per_rank * 4e-4)
    request = Request(schedule, 8, stages_per_rank=per_rank)
    form = foresee(made.stages, EQUAL, chain_costs(EQUAL), FOUR, request)
    assert form.predicted.minibatch_seconds == pytest.approx(WORK + bubble)


def test_the_search_takes_what_wins() -> None:
    """Eight microbatches on four devices: much is lost to filling and draining; zb-h1 where layers cannot be cut."""
    assert plan(EQUAL, FOUR, microbatches=8, straight=True, synchronous=True).schedule == "zb-v"
    assert plan(EQUAL, FOUR, microbatches=8, straight=True, synchronous=True, whole_backwards=True).schedule not in (
        "zb-h1",
        "zb-v",
    )
    four = Profile((replace(LAYER, forward_seconds=2.0, backward_seconds=4.0, weight_seconds=2.0),) * 4, 5)
    assert plan(four, FOUR, microbatches=8, straight=True, synchronous=True).schedule == "zb-h1"


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (replace(LAYER, weight_seconds=0.0), "nothing that could wait"),
        (replace(LAYER, parameter_bytes=0, weight_seconds=None), "no weights"),
        (LayerProfile("", 1e-5, 2e-5, 0, 10, 100, weight_seconds=1e-5), "parts cost more than they gain"),
    ],
)
def test_the_search_leaves_backwards_whole_where_parts_do_not_win(layer: LayerProfile, why: str) -> None:
    made = plan(Profile((layer,) * 4, 5), FOUR, microbatches=8, straight=True, synchronous=True)

    assert made.schedule not in ("zb-h1", "zb-v"), why


def test_recomputation_saves_the_last_rank_nothing() -> None:
    """Its input parts directly follow their forwards, and all that was saved is kept for p weight parts."""
    profile = Profile((replace(LAYER, saved_bytes=1e6),) * 4, 1)
    peaks = {}
    for schedule in ("1f1b-flush", "zb-h1"):
        for recompute in (False, True):
            made = Plan.uniform(4, 4, schedule, 8, recompute=recompute)
            peaks[schedule, recompute] = max(evaluate(made, profile, FOUR).peak_bytes)

    assert peaks["1f1b-flush", True] < 1.1e6 < 4e6 <= peaks["zb-h1", True]
    tight = Cluster.uniform(4, 1e9, memory_bytes=2e6)
    found = plan(profile, tight, microbatches=8, straight=True, synchronous=True)
    assert found.recompute and found.schedule not in ("zb-h1", "zb-v")
    held = plan(profile, tight, schedule="zb-h1", microbatches=8, straight=True)
    assert held.order and max(held.predicted.peak_bytes) <= 2e6, "forwards wait"


def test_a_measured_weight_part_is_what_counts() -> None:
    """None is half of the backward, if there are parameters."""
    reported = [replace(LAYER, weight_seconds=part).weight_part_seconds for part in (None, 0.0, 0.5, 2.0)]

    assert reported == [1.0, 0.0, 0.5, 2.0]
    assert replace(LAYER, weight_seconds=None, parameter_bytes=0).weight_part_seconds == 0.0
    made = Plan.uniform(4, 4, "zb-h1", 4)
    for part, seconds in ((1.0, 4 * 3 + 3), (0.0, 4 * 3 + 3 * 3), (0.5, 4 * 3 + 3 * 2)):
        profile = Profile((replace(LAYER, weight_seconds=part),) * 4, 1)
        assert simulate(made, profile, Cluster.uniform(4, inf), split_seconds=0.0).seconds == seconds


def folded_plans(profile: Profile, ranks: int, bandwidth: float, request: Request):
    """(Slowest rank or link, worst bytes, cuts) of all ways to cut, for stages in a V."""
    layers = profile.layers
    for marks in combinations(range(1, len(layers)), 2 * ranks - 1):
        parts = list(pairwise((0, *marks, len(layers))))
        slowest = worst = 0.0
        for rank in range(ranks):
            own = [parts[rank], parts[-1 - rank]]
            slowest = max(slowest, sum(layer.seconds for i, j in own for layer in layers[i:j]))
            if rank < ranks - 1:
                link = layers[parts[rank][1] - 1].cut_bytes + layers[parts[-1 - rank][0] - 1].cut_bytes
                slowest = max(slowest, 2 * link / bandwidth)
            kept = 2 * min(request.microbatches, ranks) * max(sum(a.saved_bytes for a in layers[i:j]) for i, j in own)
            if request.microbatches < 2 * ranks - rank:
                both = min(request.microbatches, 2 * ranks - rank) + min(request.microbatches, rank + 1)
                kept = min(2 * ranks, both) * max(sum(a.saved_bytes for a in layers[i:j]) for i, j in own)
            each = [sum(layer.saved_bytes for layer in layers[i:j]) for i, j in own]
            counts = [min(request.microbatches, most) for most in (2 * ranks - rank, rank + 1)]
            kept = min(kept, sum(count * saved for count, saved in zip(counts, each, strict=True)))
            weights = sum(layer.parameter_bytes for i, j in own for layer in layers[i:j])
            worst = max(worst, kept + (2 + request.optimizer_copies) * weights)
        yield slowest, worst, marks


number = st.integers(0, 9)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 3).flatmap(
        lambda ranks: st.tuples(
            st.just(ranks), st.lists(st.tuples(*[number] * 5), min_size=2 * ranks, max_size=2 * ranks + 3)
        )
    ),
    st.integers(1, 8),
    st.sampled_from([0.5, 2.0, 8.0]),
    st.floats(0, 1),
)
def test_folded_plans_balance_ranks_and_are_the_best_of_all(
    problem: tuple[int, list[tuple[int, ...]]], microbatches: int, bandwidth: float, share: float
) -> None:
    ranks, rows = problem
    profile = Profile(tuple(LayerProfile(str(index), *row) for index, row in enumerate(rows)), 1)
    request = Request("zb-v", microbatches, stages_per_rank=2)
    plans = list(folded_plans(profile, ranks, bandwidth, request))
    needs = sorted(held for _, held, _ in plans)
    memory = max(needs[int(share * (len(needs) - 1))], 1.0)
    best = min(seconds for seconds, held, _ in plans if held <= memory)
    made = find_pipedream(profile, Cluster.uniform(ranks, bandwidth, memory), request)

    assert made.predicted.bottleneck_seconds == pytest.approx(best, rel=1e-12)
    assert max(made.predicted.peak_bytes) <= memory


@pytest.mark.parametrize("ranks", range(1, 6))
def test_planner_and_schedule_agree_on_what_a_rank_holds(ranks: int) -> None:
    for microbatches in range(1, 3 * ranks + 1):
        made = Schedule("zb-v", ranks, microbatches, 2)

        proved = verify(made, 1)
        assert chunks_in_flight(ranks, 2, microbatches, "zb-v") == (proved.in_flight_of_rank, proved.in_flight)


def test_a_link_of_a_folded_pipeline_has_two_cuts() -> None:
    costs = chain_costs(Profile((replace(LAYER, cut_bytes=50.0),) * 4, 1))
    folded = [Stage(index, index + 1, (rank,)) for index, rank in enumerate((0, 1, 1, 0))]

    assert slowest_part(folded, costs, Cluster.uniform(2, 10.0), "ring") == (20.0, "link before stages 1 and 3")
    assert slowest_part(folded, costs, Cluster.uniform(2, 1e3), "ring") == (6.0, "stages 0 and 3")


def test_replicas_of_a_folded_pipeline() -> None:
    """Two equal pipelines of two ranks: each microbatch goes there and back on one of them."""
    made = plan(EQUAL, FOUR, planner="interleaved", schedule="zb-v", microbatches=12)

    assert [stage.ranks for stage in made.stages] == [(0, 1), (2, 3), (2, 3), (0, 1)]
    # 6 microbatches in each pipeline, stages of 2 s; one forward is what is left of the bubble.
    assert made.predicted.minibatch_seconds == pytest.approx(6 * 12 + 2, abs=1e-2)
    assert peak_bytes(made, chain_costs(EQUAL), 0.0) == (4 * 20 + 2 * 400,) * 4


def test_files_with_and_without_weight_parts(tmp_path: Path) -> None:
    reported = Profile((LAYER, replace(LAYER, weight_seconds=None)), 1)
    reported.save(tmp_path / "profile.json")

    assert Profile.load(tmp_path / "profile.json") == reported
    assert (tmp_path / "profile.json").read_text().count("weight_seconds") == 1
    assert reported.scaled(4).layers[0].weight_seconds == 4.0
    assert reported.scaled(4).layers[1].weight_seconds is None


def test_simulate_takes_what_a_split_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Plan.uniform(2, 2, "zb-h1", 4).save(tmp_path / "plan.yaml")
    Profile((LAYER,) * 2, 1).save(tmp_path / "profile.json")
    found = []
    for cost in ("0", "0.25"):
        files = [str(tmp_path / name) for name in ("plan.yaml", "profile.json")]
        assert main(["simulate", *files, "--split-seconds", cost, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["seconds"])

    # The last stage computes from 1 s on and then all the time: four weight parts are a second longer.
    assert found == [13.0, 14.0]
