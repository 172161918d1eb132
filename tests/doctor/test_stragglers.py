"""Stragglers in timelines whose durations are known, since they were simulated."""

from dataclasses import replace

import pytest

from penstock.doctor.stragglers import SlowPart, find_slow_layers, find_stragglers, recut, stage_seconds
from penstock.errors import PlanError
from penstock.simulating import simulate
from penstock.timelines import Timeline
from penstock.values import Cluster, LayerProfile, Plan, Profile, Stage

LAYERS = 8


def profile_of(*seconds: float) -> Profile:
    """Layers whose backwards take twice their forwards."""
    layers = (LayerProfile(str(index), one / 3, 2 * one / 3, 1000.0, 0.0, 0.0) for index, one in enumerate(seconds))
    return Profile(tuple(layers), 1)


def measured(plan: Plan, seconds: tuple[float, ...], cluster: Cluster | None = None) -> Timeline:
    """What a run would measure whose layers take `seconds`."""
    return simulate(plan, profile_of(*seconds), cluster or Cluster.uniform(plan.ranks, 1e9), minibatches=3)


EVEN = (1.0,) * LAYERS
PLAN = Plan.uniform(LAYERS, 4, "1f1b-flush", 8)
SLOW_STAGE_2 = (1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0)


def test_even_stages_have_no_stragglers() -> None:
    found = find_stragglers(measured(PLAN, EVEN), PLAN, EVEN)

    assert not found
    assert [(rank, stage) for rank, stage, _ in found.work] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    # The simulator adds up times.
    assert [seconds for *_, seconds in found.work] == pytest.approx([2.0] * 4)
    assert str(found).startswith("no stragglers")


def test_a_stage_is_compared_with_its_share_of_the_work() -> None:
    found = find_stragglers(measured(PLAN, SLOW_STAGE_2), PLAN, EVEN)

    (one,) = found.found
    assert (one.kind, one.name) == (SlowPart.STAGE, "stage 2 on rank 2 (layers [4, 6))")
    assert one.factor == pytest.approx(2.0)
    assert "4 s, expected 2 s (2.00 times) by its share of the estimated work" in str(found)
    # The estimate knew it.
    assert not find_stragglers(measured(PLAN, SLOW_STAGE_2), PLAN, SLOW_STAGE_2)


def test_a_stage_is_compared_with_its_profile_if_there_is_one() -> None:
    timeline = measured(PLAN, SLOW_STAGE_2)

    assert not find_stragglers(timeline, PLAN, EVEN, profile=profile_of(*SLOW_STAGE_2))
    # All of them are slow: no other stage shows that.
    all_slow = find_stragglers(timeline, PLAN, SLOW_STAGE_2, profile=profile_of(*(one / 2 for one in SLOW_STAGE_2)))
    assert [one.factor for one in all_slow.found] == pytest.approx([2.0] * 4)


def test_a_replica_is_compared_with_the_others() -> None:
    plan = Plan((Stage(0, 8, (0, 1, 2)),), "1f1b-flush", 6)
    timeline = measured(plan, EVEN)
    late = tuple(
        replace(span, start_seconds=2 * span.start_seconds, stop_seconds=2 * span.stop_seconds)
        if span.rank == 1
        else span
        for span in timeline.spans
    )
    (one,) = find_stragglers(Timeline(late, 3), plan, EVEN).found

    assert (one.kind, one.name) == (SlowPart.RANK, "rank 1")
    assert one.factor == pytest.approx(2.0)
    assert one.compared == "the other replicas of its stages"


def test_a_rank_whose_stages_are_all_slow_is_the_straggler() -> None:
    plan = Plan.uniform(LAYERS, 8, "interleaved", 8, stages_per_rank=2)
    seconds = tuple(2.0 if layer % 4 == 1 else 1.0 for layer in range(LAYERS))
    (one,) = find_stragglers(measured(plan, seconds), plan, EVEN).found

    assert (one.kind, one.name) == (SlowPart.RANK, "rank 1")
    assert one.seconds == pytest.approx(4.0)


@pytest.mark.parametrize("method", ["zb-h1", "zb-v"])
def test_halves_of_backwards_count_together(method: str) -> None:
    plan = Plan.uniform(LAYERS, 8 if method == "zb-v" else 4, method, 8, stages_per_rank=2 if method == "zb-v" else 1)

    assert not find_stragglers(measured(plan, EVEN), plan, EVEN)


def test_one_late_action_is_no_straggler() -> None:
    timeline = measured(PLAN, EVEN)
    last = max(timeline.spans, key=lambda span: span.stop_seconds if span.kind == "forward" else 0.0)
    spans = [replace(span, stop_seconds=1e3) if span is last else span for span in timeline.spans]

    assert not find_stragglers(Timeline(tuple(spans), 4), PLAN, EVEN)


def test_a_slow_link_is_compared_with_the_others() -> None:
    rows = [[1e3 if {a, b} == {1, 2} else 1e6 for b in range(4)] for a in range(4)]
    found = find_stragglers(measured(PLAN, EVEN, Cluster.from_matrix(rows)), PLAN, EVEN)

    assert {one.name for one in found.found} == {"link 1->2", "link 2->1"}
    assert {one.kind for one in found.found} == {SlowPart.LINK}


def test_layers_are_compared_with_other_processes_or_a_profile() -> None:
    seconds = [[1.0, 1.0], [1.0, 3.0]]
    (one,) = find_slow_layers(["embed", "head"], seconds, None)

    assert (one.name, one.factor) == ("layer 1 (head) in process 1", 3.0)
    names = [one.name for one in find_slow_layers(["embed", "head"], seconds, profile_of(0.5, 3.0))]
    assert names == ["layer 0 (embed) in process 0", "layer 0 (embed) in process 1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"weights": (1.0,)}, "weights: expected 8 layers, as the plan has, found 1"),
        ({"weights": EVEN, "profile": profile_of(1.0)}, "profile: expected 8 layers, as the plan has, found 1"),
        ({"weights": EVEN, "tolerance": float("nan")}, "tolerance: expected a number above 1, found nan"),
        ({"weights": EVEN, "tolerance": 1.0}, "tolerance: expected a number above 1, found 1.0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        find_stragglers(measured(PLAN, EVEN), PLAN, **arguments)  # type: ignore[arg-type]


def test_layers_move_away_from_a_slow_stage() -> None:
    seconds = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0)
    old = Plan.uniform(LAYERS, 2, "1f1b-flush", 8)
    new = recut(old, EVEN, stage_seconds(measured(old, seconds)))

    assert [(stage.start, stage.stop) for stage in new.stages] == [(0, 5), (5, 8)]
    assert (new.predicted, new.planner, new.schedule, new.microbatches) == (None, "replan", "1f1b-flush", 8)
    assert "slowest stage: 8 s a microbatch as measured, 6 s expected with layers [0, 5), [5, 8)" in new.explanation
    assert "pipe.replan(apply=directory)" in new.explanation


def test_a_good_cut_stays() -> None:
    new = recut(PLAN, EVEN, stage_seconds(measured(PLAN, EVEN)))

    assert new.stages == PLAN.stages


def test_replicas_in_turn_share_the_load_of_their_stage() -> None:
    old = Plan((Stage(0, 4, (0, 1, 2)), Stage(4, 8, (3,))), "1f1b-flush", 12)
    new = recut(old, EVEN, stage_seconds(measured(old, EVEN)))

    assert [(stage.start, stage.stop) for stage in new.stages] == [(0, 6), (6, 8)]


def test_without_a_measurement_there_is_no_new_cut() -> None:
    with pytest.raises(PlanError, match=r"measured seconds of all 4 stages, found none of stages \[0, 1, 2, 3\]"):
        recut(PLAN, EVEN, {})
