"""Skips in schedules: exact programs, the laws with them, and the choice between direct and relayed."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Receive, Send, format_programs
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.skips import MESSAGE_BYTES, choose_skips
from penstock.scheduling.verification.verifier import verify
from support.schedule_strategies import replicated_schedules, schedules, waiting_schedules

PROGRAMS = {
    "gpipe": (
        1,
        "rank 0: 0F0@0 0S0>1 0S0>2 0F1@0 0S1>1 0S1>2 0R0<2 0R0<1 0B0@0 0R1<2 0R1<1 0B1@0 0U1<0\n"
        "rank 1: 1R0<0 1F0@0 1S0>2 1R1<0 1F1@0 1S1>2 1R0<2 1B0@0 1S0>0 1R1<2 1B1@0 1S1>0 1U1<0\n"
        "rank 2: 2R0<0 2R0<1 2F0@0 2R1<0 2R1<1 2F1@0 2B0@0 2S0>1 2S0>0 2B1@0 2S1>1 2S1>0 2U1<0",
    ),
    "pipedream": (
        1,
        "rank 0: 0F0@0 0S0>1 0S0>2 0F1@0 0S1>1 0S1>2 0R0<2 0R0<1 0B0@0 0U1<0 0R1<2 0R1<1 0B1@0 0U2<0\n"
        "rank 1: 1R0<0 1F0@0 1S0>2 1R1<0 1F1@0 1S1>2 1R0<2 1B0@0 1S0>0 1U1<0 1R1<2 1B1@0 1S1>0 1U2<0\n"
        "rank 2: 2R0<0 2R0<1 2F0@0 2B0@0 2S0>1 2S0>0 2U1<0 2R1<0 2R1<1 2F1@1 2B1@1 2S1>1 2S1>0 2U2<1",
    ),
    "2bw": (
        1,
        "rank 0: 0F0@0 0S0>1 0S0>2 0F1@0 0S1>1 0S1>2 0F2@0 0S2>1 0S2>2 0R0<2 0R0<1 0B0@0 0R1<2 0R1<1 0B1@0 "
        "0R2<2 0R2<1 0B2@0 0U1<0\n"
        "rank 1: 1R0<0 1F0@0 1S0>2 1R1<0 1F1@0 1S1>2 1R0<2 1B0@0 1S0>0 1R2<0 1F2@0 1S2>2 1R1<2 1B1@0 1S1>0 "
        "1R2<2 1B2@0 1S2>0 1U1<0\n"
        "rank 2: 2R0<0 2R0<1 2F0@0 2B0@0 2S0>1 2S0>0 2R1<0 2R1<1 2F1@0 2B1@0 2S1>1 2S1>0 2R2<0 2R2<1 2F2@0 2B2@0 "
        "2S2>1 2S2>0 2U1<0",
    ),
}
SIZES = {"gpipe": 2, "pipedream": 2, "2bw": 3}


@pytest.mark.parametrize("method", PROGRAMS)
def test_programs_of_three_stages(method: str) -> None:
    minibatches, expected = PROGRAMS[method]

    assert format_programs(Schedule(method, 3, SIZES[method], skips=((0, 2),)).program(minibatches)) == expected


BIG = 1e9
"""Bytes that are worth a message of their own."""


def all_hops(schedule: Schedule) -> list[tuple[int, int]]:
    stages = range(schedule.stages)
    return [(here, there) for here in stages for there in stages if there > here + 1]


def without_far(programs):
    return tuple(
        tuple(
            action
            for action in row
            if not (isinstance(action, Send) and abs(action.stage - action.target) > 1)
            and not (isinstance(action, Receive) and abs(action.stage - action.source) > 1)
        )
        for row in programs
    )


alone = st.one_of(schedules(5, 6), replicated_schedules(5, 3, 8), waiting_schedules(5, 6))


@given(alone.filter(lambda made: made.stages_per_rank == 1), st.data())
@settings(max_examples=80)
def test_any_skips_of_stages_on_ranks_of_their_own_keep_every_law(made: Schedule, data) -> None:
    hops = all_hops(made)
    skips = data.draw(st.lists(st.sampled_from(hops), unique=True)) if hops else []
    direct = replace(made, skips=tuple(sorted(skips)))

    verify(direct)
    if not made.ties:
        # Gradients of shared weights leave later where they share a queue with what skips stages.
        assert without_far(direct.program(3)) == made.program(3)


@given(st.one_of(replicated_schedules(4, 3, 6), waiting_schedules(4, 5)), st.data())
@settings(max_examples=80)
def test_a_skip_is_taken_if_the_laws_allow(made: Schedule, data) -> None:
    """What is chosen keeps every law, and each skip that is left out breaks one beside those that are taken.

    Skips that save no message, since their stages share ranks with their neighbors, are not wanted.
    """

    def sends(*stages: int) -> int:
        return sum(made.placement.stages[one] != made.placement.stages[other] for one, other in pairwise(stages))

    hops = [hop for hop in all_hops(made) if sends(*range(hop[0], hop[1] + 1)) > sends(*hop)]
    wanted = data.draw(st.lists(st.sampled_from(hops), unique=True, max_size=6)) if hops else []
    chosen = choose_skips(made, dict.fromkeys(wanted, BIG))

    verify(chosen)
    assert set(chosen.skips) <= set(wanted)
    assert replace(chosen, skips=()) == made
    if made.placement.split and not made.placement.equal(range(made.stages)):
        assert chosen.skips == ()
        return
    for skip in set(wanted) - set(chosen.skips):
        with pytest.raises(ScheduleError):
            verify(replace(made, skips=tuple(sorted({*chosen.skips, skip}))))


@pytest.mark.parametrize("method", ["gpipe", "1f1b-flush", "spp", "2bw"])
def test_stages_may_share_weights_and_a_skip(method: str) -> None:
    """Tied gradients and activations take one queue then, and keep their places in it."""
    made, hops = Schedule(method, 4, 4, ties=((0, 3), (1, 3))), {(0, 3): BIG, (1, 3): BIG}

    assert choose_skips(made, hops).skips == ((0, 3), (1, 3))
    assert choose_skips(replace(made, norms=True), hops).skips == ((0, 3), (1, 3))


def test_interleaved_stages_skip_where_a_queue_keeps_its_order() -> None:
    made = Schedule("interleaved", 3, 6, 2)
    hops = dict.fromkeys(all_hops(made), BIG)

    # A round of all ranks ends on the rank that it began on: nothing is sent at all.
    assert choose_skips(made, hops).skips == ((0, 3), (1, 4), (2, 5))
    assert format_programs(choose_skips(made, hops).program(1)) == format_programs(made.program(1))


def test_auto_takes_what_saves_more_bytes_than_a_message_costs() -> None:
    made = Schedule("gpipe", 5, 2)
    hops = {(0, 2): MESSAGE_BYTES, (0, 4): MESSAGE_BYTES / 3 + 1, (1, 3): MESSAGE_BYTES + 1, (1, 4): 1.0}

    assert choose_skips(made, hops).skips == ((0, 4), (1, 3))


def test_what_stays_on_its_rank_costs_no_message() -> None:
    there_and_back = Schedule.placed("gpipe", Placement(((0,), (1,))), 2)
    made = Schedule("interleaved", 2, 2, 2)

    assert choose_skips(there_and_back, {}).skips == ()
    assert choose_skips(made, {(0, 2): 1.0}).skips == ((0, 2),)
