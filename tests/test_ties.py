"""Weights that several stages share: the gradients' exchange in the schedule, and its laws."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.scheduling.actions import format_programs, parse_programs
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verifier import verify, verify_programs

FLUSHING = ("gpipe", "1f1b-flush", "interleaved")
TIED = Schedule("gpipe", 3, 1, ties=((0, 2),))


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


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_tie_verifies(data: st.DataObject) -> None:
    method = data.draw(st.sampled_from(FLUSHING))
    ranks = data.draw(st.integers(1, 5))
    per_rank = data.draw(st.integers(1, 3)) if method == "interleaved" else 1
    stages = st.lists(st.integers(0, ranks * per_rank - 1), min_size=2, unique=True).map(
        lambda group: tuple(sorted(group))
    )
    ties = tuple(data.draw(st.lists(stages, max_size=4))) if ranks * per_rank > 1 else ()
    made = Schedule(method, ranks, ranks * data.draw(st.integers(1, 2)), per_rank, ties=ties)

    verify(made, minibatches=2)


@pytest.mark.parametrize(
    ("old", "new", "law", "expected"),
    [
        (
            "0T1<2 0U1<0",
            "0U1<0 0T1<2",
            "an action comes after what it needs",
            "the gradients of tied weights of stage 2 for version 1 on stage 0 before 0U1<0",
        ),
        (
            "0B0@0 0T1>2",
            "0T1>2 0B0@0",
            "an action comes after what it needs",
            "the backward of microbatch 0 on stage 0 before 0T1>2",
        ),
        (
            "2T1>0 2T1<0",
            "2T1<0",
            "every message is sent once and received once; none is left over after the drain",
            "2T1>0 on rank 2",
        ),
        (
            "1U1<0",
            "1T1>2 1U1<0",
            "only adjacent stages, and stages that share weights, talk, and only when they are on different ranks",
            "a stage on another rank that shares weights with stage 1",
        ),
    ],
)
def test_a_broken_exchange_is_caught(old: str, new: str, law: str, expected: str) -> None:
    text = format_programs(TIED.program(1))
    assert text.count(old) == 1
    with pytest.raises(ScheduleError) as caught:
        verify_programs(parse_programs(text.replace(old, new)), TIED, 1)

    lines = str(caught.value).splitlines()
    assert lines[0] == f"schedule 'gpipe' breaks a law: {law}"
    assert lines[2] == f"  expected: {expected}"


def test_waiting_before_sending_stands_still() -> None:
    text = format_programs(TIED.program(1)).replace("0T1>2 0T1<2", "0T1<2 0T1>2").replace("2T1>0 2T1<0", "2T1<0 2T1>0")
    with pytest.raises(ScheduleError) as caught:
        verify_programs(parse_programs(text), TIED, 1)

    assert "found: rank 0 waits for rank 2, rank 2 waits for rank 0" in str(caught.value)


def test_a_schedule_that_updates_behind_every_microbatch_refuses() -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule("1f1b", 3, 3, ties=((0, 2),))

    assert str(caught.value) == (
        "schedule '1f1b': stages 0, 2 share weights, and every stage updates at its own time, so that their copies "
        "drift apart; choose a flushing schedule (gpipe, 1f1b-flush, interleaved, spp) or 2bw, untie the weights, or put the "
        "layers that share them into one stage"
    )


@pytest.mark.parametrize("group", [(0,), (2, 0), (0, 0), (0, 3), (-1, 1)])
def test_ties_name_stages(group: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match=r"expected two or more different stages of 0 to 2, ascending"):
        Schedule("gpipe", 3, 3, ties=(group,))
