"""Norms of gradients that stages tell each other: what is known at an update, the programs, and that nothing stalls."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.rendering import render
from penstock.scheduling.actions import ReceiveNorms, format_programs, parse_programs
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule, inference
from penstock.scheduling.verification.verifier import verify, verify_programs
from penstock.simulating import simulate
from penstock.simulating.action_costs import Costs
from penstock.simulating.simulator import execute
from penstock.values.clusters import Cluster
from penstock.values.profiles import LayerProfile, Profile
from support.schedule_strategies import replicated_schedules, schedules


def synchronizes(schedule: Schedule) -> bool:
    return schedule.definition.synchronizes_updates


def test_flush_two_and_three_stages() -> None:
    assert format_programs(Schedule("1f1b-flush", 2, 1, norms=True).step(0)) == (
        "rank 0: 0F0@0 0S0>1 0R0<1 0B0@0 0N1<1 0N1>1 0U1<0\nrank 1: 1R0<0 1F0@0 1B0@0 1S0>0 1N1>0 1N1<0 1U1<0"
    )
    assert format_programs(Schedule("1f1b-flush", 3, 1, norms=True).step(0)) == (
        "rank 0: 0F0@0 0S0>1 0R0<1 0B0@0 0N1<1 0N1>1 0U1<0\n"
        "rank 1: 1R0<0 1F0@0 1S0>2 1R0<2 1B0@0 1S0>0 1N1<2 1N1>0 1N1<0 1N1>2 1U1<0\n"
        "rank 2: 2R0<1 2F0@0 2B0@0 2S0>1 2N1>1 2N1<1 2U1<0"
    )


def test_interleaved_collects_from_its_last_stage_and_sends_from_its_first() -> None:
    first, second = format_programs(Schedule("interleaved", 2, 2, 2, norms=True).step(0)).splitlines()

    assert first.endswith("0B1@0 2N1<3 2N1>1 0N1<1 0N1>1 2N1<1 2N1>3 0U1<0 2U1<0")
    assert second.endswith("1B1@0 1S1>0 3N1>2 1N1<2 1N1>0 1N1<0 1N1>2 3N1<2 1U1<0 3U1<0")


def test_stages_of_one_rank_send_nothing() -> None:
    alone = Schedule("interleaved", 1, 2, 3)

    assert replace(alone, norms=True).program(2) == alone.program(2)
    assert replace(Schedule("2bw", 1, 2), norms=True).program(2) == Schedule("2bw", 1, 2).program(2)
    assert inference(2, 1, 2).norms is False


def test_two_bw_sends_behind_the_last_backward_and_receives_before_the_next_forward_but_one() -> None:
    """What is known goes back in the step of the backward, and on at the start of the step that reads the version."""
    two = Schedule("2bw", 2, 2, norms=True)
    assert format_programs(two.step(2)) == (
        "rank 0: 0N1>1 0U1<0 0F4@1 0S4>1 0R3<1 0B3@0 0N2<1 0F5@1 0S5>1 0R4<1 0B4@1\n"
        "rank 1: 1N1<0 1U1<0 1R4<0 1F4@1 1B4@1 1S4>0 1R5<0 1F5@1 1B5@1 1S5>0 1N3>0"
    )
    assert format_programs(two.drain(3)) == (
        "rank 0: 0R5<1 0B5@1 0N3<1 0N2>1 0N3>1 0U2<0 0U3<1\nrank 1: 1N2<0 1N3<0 1U2<0 1U3<1"
    )
    assert format_programs(Schedule("2bw", 3, 3, norms=True).step(2)) == (
        "rank 0: 0N1>1 0U1<0 0F6@1 0S6>1 0R4<1 0B4@0 0F7@1 0S7>1 0R5<1 0B5@0 0N2<1 0F8@1 0S8>1 0R6<1 0B6@1\n"
        "rank 1: 1N1<0 1N1>2 1U1<0 1R6<0 1F6@1 1S6>2 1R5<2 1B5@0 1S5>0 1N2<2 1N2>0 1R7<0 1F7@1 1S7>2 1R6<2 1B6@1 "
        "1S6>0 1R8<0 1F8@1 1S8>2 1R7<2 1B7@1 1S7>0\n"
        "rank 2: 2N1<1 2U1<0 2R6<1 2F6@1 2B6@1 2S6>1 2R7<1 2F7@1 2B7@1 2S7>1 2R8<1 2F8@1 2B8@1 2S8>1 2N3>1"
    )


@pytest.mark.parametrize("method", ["gpipe", "2bw"])
def test_every_replica_receives_once_from_the_one_beside_it(method: str) -> None:
    """Replica i receives from replica i mod r of a stage of r; the others of that stage send nothing."""
    made = Schedule.placed(method, Placement(((0, 1, 2), (3, 4), (5,))), 6, norms=True)

    assert made.placement.peer_replicas(1, 0, 3) == (0, 2)
    assert made.placement.peer_replicas(1, 0, 4) == (1,)
    assert made.placement.peer_replicas(0, 1, 2) == ()
    assert made.placement.peer_replicas(2, 1, 5) == (3, 4)
    for row in made.program(2):
        received = [action for action in row if isinstance(action, ReceiveNorms)]
        assert len(received) == len(set(received)) == 2 * (2 if row[0].stage == 1 else 1)
    verify(made)


@settings(max_examples=50, deadline=None)
@given(replicated_schedules(4, 3, 8).filter(synchronizes), st.integers(1, 4))
def test_every_schedule_of_replicas_verifies_with_norms(schedule: Schedule, minibatches: int) -> None:
    verify(replace(schedule, norms=True), minibatches)


@settings(max_examples=60, deadline=None)
@given(st.data(), schedules(4, 6).filter(synchronizes))
def test_norms_add_no_stall(data: st.DataObject, schedule: Schedule) -> None:
    """Whatever computations take: in every step each forward and backward starts when it does without norms."""
    made, stages = replace(schedule, norms=True), schedule.stages
    seconds = st.tuples(*[st.integers(1, 9).map(float)] * stages)
    # Under 2bw the updates themselves come at another time.
    updates = (0.0,) * stages if schedule.method == "2bw" else data.draw(seconds)
    costs = Costs(data.draw(seconds), data.draw(seconds), updates)
    steps = 1 if schedule.flushes else data.draw(st.integers(1, 6))
    stepped = {str(action) for step in range(steps) for row in schedule.step(step) for action in row}

    def starts(tried: Schedule) -> dict[str, float]:
        spans = execute(tried.program(steps), tried.placement, costs).spans
        return {
            span.action: span.start_seconds
            for span in spans
            if span.action in stepped and span.kind in ("forward", "backward")
        }

    assert starts(made) == starts(schedule)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(2, 4), st.integers(2, 3))
def test_norms_of_parallel_pipelines_add_no_stall(data: st.DataObject, stages: int, replicas: int) -> None:
    ranks = stages * replicas
    placement = Placement(tuple(tuple(range(first, first + replicas)) for first in range(0, ranks, replicas)))
    bare = Schedule.placed("2bw", placement, data.draw(st.integers(ranks, ranks + 4)))
    seconds = st.tuples(*[st.integers(1, 9).map(float)] * stages)
    costs = Costs(data.draw(seconds), data.draw(seconds))
    minibatches = data.draw(st.integers(1, 5))
    played = [execute(made.program(minibatches), placement, costs) for made in (bare, replace(bare, norms=True))]

    assert played[0].seconds == played[1].seconds


def test_messages_are_small_and_take_their_time() -> None:
    """24 bytes for three stages at 8 bytes/s are 3 s: two messages back and two on after the first backward."""
    profile = Profile(tuple(LayerProfile("", 1.0, 1.0, 0.0, 0.0, 0.0) for _ in range(3)), 1)
    made = Schedule("gpipe", 3, 1)

    assert simulate(made, profile, Cluster.uniform(3, 8.0)).seconds == 6
    assert simulate(replace(made, norms=True), profile, Cluster.uniform(3, 8.0)).seconds == 4 + 4 * 3
    # A receiver that cannot compute meanwhile begins to take the first of them when its own backward is done.
    without = simulate(replace(made, norms=True), profile, Cluster.uniform(3, 8.0), overlap=False)
    assert without.seconds == 5 + 4 * 3


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("replicas", [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1, 2))])
def test_replicas_are_simulated(replicas: tuple[tuple[int, ...], ...], split: bool) -> None:
    profile = Profile(tuple(LayerProfile("", 1.0, 1.0, 0.0, 1.0, 1.0) for _ in range(2)), 1)
    made = Schedule.placed("2bw", Placement(replicas, split), 4, norms=True)
    cluster = Cluster.uniform(made.ranks, float("inf"))
    timeline = simulate(made, profile, cluster, 4)
    rows = made.program(4)

    assert [span.action for span in timeline.spans] == [str(action) for row in rows for action in row]
    assert [max(size for _, size in memory.buffers) for memory in timeline.memory] == [2] * made.ranks


def test_pictures_show_them_like_other_messages() -> None:
    made = Schedule("1f1b-flush", 3, 2, norms=True)
    timeline = execute(made.program(2), made.placement, Costs.unit(3))
    words = {span.action: (span.kind, span.words, span.details) for span in timeline.spans}

    assert words["1N2>0"] == (
        "send",
        "send norms for version 2 to stage 0",
        {"action": "1N2>0", "stage": 1, "version": 2, "target": 0},
    )
    assert words["1N1<0"][:2] == ("receive", "receive norms for version 1 from stage 0")
    assert "N" not in "".join(render(made).splitlines()[2:])


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ("1N1>0 1N1<2 1N1<0 1N1>2", "the norm for version 1 on stage 2 before 1N1>0"),
        ("1N1<2 1N1<0 1N1>0 1N1>2", "no rank waits forever"),
    ],
)
def test_a_rank_that_sends_too_soon_or_waits_for_an_earlier_stage_is_found(there: str, message: str) -> None:
    flush = Schedule("1f1b-flush", 3, 1, norms=True)
    text = format_programs(flush.program(1))
    assert "1N1<2 1N1>0 1N1<0 1N1>2" in text
    with pytest.raises(ScheduleError, match=message):
        verify_programs(parse_programs(text.replace("1N1<2 1N1>0 1N1<0 1N1>2", there)), flush, 1)


def test_tied_gradients_are_whole_in_time_for_norms() -> None:
    verify(Schedule.placed("gpipe", Placement(((0, 1), (2, 3))), 4, ties=((0, 1),), norms=True))
    verify(Schedule("2bw", 4, 4, ties=((0, 3), (1, 2)), norms=True))
