"""Weights that several stages share: the gradients' exchange in the schedule, and its laws."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.scheduling.actions import format_programs, parse_programs
from penstock.scheduling.definitions import Step
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.verifier import verify, verify_programs
from penstock.simulating import simulate
from penstock.simulating.action_costs import Costs
from penstock.simulating.simulator import execute
from penstock.values.clusters import Cluster
from penstock.values.profiles import LayerProfile, Profile

TIED = Schedule("gpipe", 3, 1, ties=((0, 2),))
DELAYED = Schedule("2bw", 3, 3, ties=((0, 2),))
NEIGHBOURS = Schedule("2bw", 2, 2, ties=((0, 1),))


def test_gradients_are_exchanged_before_the_update() -> None:
    assert format_programs(TIED.step(0)) == (
        "rank 0: 0F0@0 0S0>1 0R0<1 0B0@0 0T1>2 0T1<2 0U1<0\n"
        "rank 1: 1R0<0 1F0@0 1S0>2 1R0<2 1B0@0 1S0>0 1U1<0\n"
        "rank 2: 2R0<1 2F0@0 2B0@0 2S0>1 2T1>0 2T1<0 2U1<0"
    )


def test_a_rank_sends_for_all_its_updates_before_it_waits() -> None:
    """Stages 0 and 3 share weights, and so do 1 and 2: each rank would wait for the other if it waited first."""
    crossed = Schedule("interleaved", 2, 2, 2, ties=((0, 3), (1, 2)))
    first, second = format_programs(crossed.step(0)).splitlines()

    assert first.endswith("0B1@0 2T1>1 0T1>3 0T1<3 0U1<0 2T1<1 2U1<0")
    assert second.endswith("1B1@0 1S1>0 3T1>0 1T1>2 1T1<2 1U1<0 3T1<0 3U1<0")
    verify(crossed)


def test_stages_of_one_rank_need_no_message() -> None:
    together = Schedule("interleaved", 2, 2, 2, ties=((0, 2),))

    assert together.program(3) == replace(together, ties=()).program(3)
    verify(together)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_every_tie_of_equally_replicated_stages_verifies(data: st.DataObject) -> None:
    stages, replicas, split = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 3)), data.draw(st.booleans())
    dealt = iter(data.draw(st.permutations(range(stages * replicas))))
    placement = Placement(tuple(tuple(next(dealt) for _ in range(replicas)) for _ in range(stages)), split)
    tie = tuple(sorted(data.draw(st.sets(st.integers(0, stages - 1), min_size=2))))
    microbatches = stages * replicas + data.draw(st.integers(0, 4))
    for method in ("1f1b-flush", "2bw"):
        verify(Schedule.placed(method, placement, microbatches, ties=(tie,)), minibatches=3)


def test_without_a_flush_updates_wait_for_the_forward_that_reads_them() -> None:
    """Stages 0 and 2 share: U1 opens step 2, and its gradients have left in step 1 (and 0 at stage 2)."""
    assert format_programs(DELAYED.step(1)) == (
        "rank 0: 0F3@0 0S3>1 0R1<1 0B1@0 0F4@0 0S4>1 0R2<1 0B2@0 0T1>2 0F5@0 0S5>1 0R3<1 0B3@0\n"
        "rank 1: 1R3<0 1F3@0 1S3>2 1R2<2 1B2@0 1S2>0 1U1<0 1R4<0 1F4@0 1S4>2 1R3<2 1B3@0 1S3>0 1R5<0 1F5@0 1S5>2 "
        "1R4<2 1B4@0 1S4>0\n"
        "rank 2: 2R3<1 2F3@0 2B3@0 2S3>1 2R4<1 2F4@0 2B4@0 2S4>1 2R5<1 2F5@0 2B5@0 2S5>1 2T2>0"
    )
    opening = [row.split()[2:6] for row in format_programs(DELAYED.step(2)).splitlines()]
    assert opening == [
        ["0T1<2", "0U1<0", "0F6@1", "0S6>1"],
        ["1R6<0", "1F6@1", "1S6>2", "1R5<2"],
        ["2T1<0", "2U1<0", "2R6<1", "2F6@1"],
    ]
    assert format_programs(DELAYED.drain(3)) == (
        "rank 0: 0R7<1 0B7@1 0R8<1 0B8@1 0T3>2 0T2<2 0U2<0 0T3<2 0U3<1\n"
        "rank 1: 1R8<2 1B8@1 1S8>0 1U3<1\n"
        "rank 2: 2T2<0 2U2<0 2T3<0 2U3<1"
    )


def test_between_neighbours_gradients_keep_their_place_in_the_queue() -> None:
    """What goes back is received behind the last gradient, what goes on is sent before the first activation."""
    first, second = format_programs(NEIGHBOURS.program(2)).splitlines()

    assert first == (
        "rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0F2@0 0S2>1 0R1<1 0B1@0 0T1<1 0F3@0 0S3>1 0R2<1 0B2@0 0R3<1 "
        "0B3@0 0T2<1 0T1>1 0T2>1 0U1<0 0U2<0"
    )
    assert second == (
        "rank 1: 1R0<0 1F0@0 1B0@0 1S0>0 1R1<0 1F1@0 1B1@0 1S1>0 1T1>0 1R2<0 1F2@0 1B2@0 1S2>0 1R3<0 1F3@0 1B3@0 "
        "1S3>0 1T2>0 1T1<0 1U1<0 1T2<0 1U2<0"
    )
    late = format_programs(NEIGHBOURS.program(2)).replace(
        "0B1@0 0T1<1 0F3@0 0S3>1 0R2<1", "0B1@0 0F3@0 0S3>1 0R2<1 0T1<1"
    )
    with pytest.raises(ScheduleError, match="expected: 0T1<1, since 1T1>0 is what rank 1 sends next to rank 0"):
        verify_programs(parse_programs(late), NEIGHBOURS, 2)


def test_stages_that_share_nothing_stay_as_they_are() -> None:
    bare = Schedule("2bw", 4, 4)

    assert replace(bare, ties=((0, 2),)).row(1, Step(3)) == bare.row(1, Step(3))
    assert replace(bare, ties=((0, 2),)).row(2, Step(3)) != bare.row(2, Step(3))
    assert (bare.guarantees.pending_updates, DELAYED.guarantees.pending_updates) == ((1, 1, 1, 1), (2, 1, 2))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_waiting_for_tied_gradients_adds_no_stall(data: st.DataObject) -> None:
    """Whatever forwards and backwards take: every one of them starts when it does without ties."""
    stages = data.draw(st.integers(2, 4))
    tie = tuple(sorted(data.draw(st.sets(st.integers(0, stages - 1), min_size=2))))
    seconds = st.tuples(*[st.integers(1, 9).map(float)] * stages)
    costs = Costs(data.draw(seconds), data.draw(seconds))
    bare = Schedule("2bw", stages, stages + data.draw(st.integers(0, 3)))

    def starts(schedule: Schedule) -> dict[str, float]:
        spans = execute(schedule.program(4), schedule.placement, costs).spans
        return {span.action: span.start_seconds for span in spans if span.kind in ("forward", "backward")}

    assert starts(replace(bare, ties=(tie,))) == starts(bare)


def test_a_stage_that_waits_holds_the_gradients_of_two_minibatches() -> None:
    profile = Profile(tuple(LayerProfile("", 1.0, 2.0, 0.0, 0.0, 10.0) for _ in range(3)), 1)
    for schedule, expected in ((DELAYED, [20, 10, 20]), (replace(DELAYED, ties=()), [10, 10, 10])):
        memory = simulate(schedule, profile, Cluster.uniform(3, float("inf")), 4).memory
        assert [max(size for _, size in rank.buffers) for rank in memory] == expected
        assert all(rank.buffers[-1][1] == 0 for rank in memory)
