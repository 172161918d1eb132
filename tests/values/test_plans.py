"""Plans: uniform ones, files, the table, and what is said of plans made by hand."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.values import Cluster, Plan, Prediction, Stage, schedule


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 30))
def test_uniform_stages_differ_by_one_layer_and_the_longer_come_first(ranks, per_rank, more):
    stages = ranks * per_rank
    schedule = "interleaved" if per_rank > 1 else "gpipe"
    plan = Plan.uniform(stages + more, stages, schedule, stages_per_rank=per_rank)
    lengths = [stage.stop - stage.start for stage in plan.stages]

    assert sum(lengths) == plan.layers == stages + more
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1
    assert [stage.ranks for stage in plan.stages] == [(stage % ranks,) for stage in range(stages)]
    assert (plan.ranks, plan.stages_per_rank) == (ranks, per_rank)


def test_devices_that_are_left_out_are_said():
    stages = (Stage(0, 2, (1,)), Stage(2, 3, (0,)))
    plan = Plan(stages, devices=(0, 3))

    assert str(plan).splitlines()[0] == "1f1b-flush: 1 microbatch, ranks: 2, on devices 0, 3"
    assert Plan(stages, devices=(0, 1)) == Plan(stages)
    assert plan.used(Cluster.uniform(4, 1e9)) == Cluster.uniform(4, 1e9).pick((0, 3))
    with pytest.raises(PlanError, match=r"2 ranks up to device 3 and the cluster 3 devices"):
        plan.used(Cluster.uniform(3, 1e9))


def test_ranks_of_different_speeds_get_what_they_can_do():
    """Six equal layers on a rank that is twice as fast as the other: four and two."""
    cuts = [stage.stop for stage in Plan.balanced([1] * 6, 2, speeds=[2, 1]).stages]

    assert cuts == [4, 6]
    assert [stage.stop for stage in Plan.balanced([1] * 6, 2, speeds=[1, 2]).stages] == [2, 6]
    assert Plan.balanced([1, 2, 3, 4], 2, speeds=[3, 3]) == Plan.balanced([1, 2, 3, 4], 2)


def test_a_plan_prints_as_a_table():
    plan = Plan(
        (Stage(0, 9, tuple(range(15))), Stage(9, 11, (15,))),
        "pipedream",
        microbatches=2,
        microbatch_size=64,
        predicted=Prediction(0.5, 256.0, 0.25, (2e9,) * 16, 0.125),
    )

    assert str(plan) == (
        "pipedream: 2 microbatches of 64, ranks: 16\n"
        "stage  layers   ranks\n"
        "    0  [0, 9)   ranks 0-14\n"
        "    1  [9, 11)  rank 15\n"
        "predicted: 0.5 s per minibatch\n"
        "  256 samples/s\n"
        "  slowest stage or link 0.25 s per microbatch\n"
        "  bubble 12.5 % of wall time, peak 2 GB"
    )


def test_streamed_stages_are_named_like_those_that_recompute(tmp_path):
    found = replace(Plan.uniform(4, 4, "breadth-first", 2, 4, recompute=True), streamed=(2, 0), places=3)

    assert (found.streamed, found.streaming, schedule(found).streamed) == ((0, 2), frozenset({0, 2}), found.streaming)
    assert str(found).startswith("breadth-first, recompute, streamed [0, 2] through 3 places: ")
    assert "streamed: [0, 2]\nplaces: 3\n" in found.to_yaml()
    found.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == found
    assert "streamed" not in replace(found, streamed=()).to_yaml()
    with pytest.raises(PlanError, match="streamed: expected stages that recompute, found stage 2, which does not"):
        replace(found, recompute=(0, 1))


def test_the_stages_that_recompute_are_named_unless_they_are_all_or_none():
    found = Plan.uniform(3, 3, recompute=(2, 0))

    assert (found.recompute, found.recomputed) == ((0, 2), frozenset({0, 2}))
    assert str(found).startswith("1f1b-flush, recompute [0, 2]: ")
    assert "recompute: [0, 2]\n" in found.to_yaml()
    assert [Plan.uniform(2, 2, recompute=given).recompute for given in ((), (1, 0))] == [False, True]


def test_a_missing_file_suggests_its_neighbour(tmp_path):
    Plan.uniform(4, 2).save(tmp_path / "gpt.yaml")

    with pytest.raises(PlanError, match=r"gtp.yaml: no such file. Did you mean 'gpt.yaml'\?"):
        Plan.load(tmp_path / "gtp.yaml")


def test_a_plan_by_hand_needs_only_its_stages(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "format: penstock-plan/1\nstages:\n- {start: 0, stop: 2, ranks: [0]}\n- {start: 2, stop: 5, ranks: [1]}\n"
    )

    assert Plan.load(path) == Plan((Stage(0, 2, (0,)), Stage(2, 5, (1,))))


def test_a_plan_file_that_is_cut_off_anywhere_is_refused_or_whole(tmp_path):
    """Wherever the file ends, `load` returns the plan, without its prediction at most, or refuses it."""
    whole = Plan.uniform(6, 3, "1f1b-flush", 4, microbatch_size=2)
    path = tmp_path / "plan.yaml"
    whole.save(path)
    text = path.read_text()
    loaded = set()
    for end in range(len(text)):
        path.write_text(text[:end])
        try:
            loaded.add(Plan.load(path))
        except PlanError as error:
            assert str(path) in str(error)

    assert loaded <= {whole}


def test_stages_of_equal_weight_are_seen_as_equal():
    """Two stages of 27: which of them is the slowest must not depend on how numbers are rounded."""
    plan = Plan.balanced([8, 19, 3, 7, 20, 10], 4, "gpipe", microbatches=2)

    assert [stage.stop for stage in plan.stages] == [2, 4, 5, 6]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_balanced_stages_are_the_best_of_all_cuts(weights, data):
    stages = data.draw(st.integers(1, len(weights)))
    plan = Plan.balanced(weights, stages, "gpipe", microbatches=2)

    def price(bounds):
        sums = [sum(weights[start:stop]) for start, stop in pairwise(bounds)]
        return max(sums), sum(weight**2 for weight in sums)

    inner = combinations(range(1, len(weights)), stages - 1)
    assert price((0, *(stage.stop for stage in plan.stages))) == min(price((0, *cuts, len(weights))) for cuts in inner)
    assert [stage.ranks for stage in plan.stages] == [(stage,) for stage in range(stages)]
    assert plan.microbatches == 2


@given(st.floats(1e-9, 1e9), st.integers(1, 6), st.integers(0, 20))
def test_layers_of_one_weight_are_cut_as_uniform_plans_are(weight, stages, more):
    assert Plan.balanced([weight] * (stages + more), stages) == Plan.uniform(stages + more, stages)
