"""The alphabet of schedules, and its text form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Fetch,
    Forward,
    Offload,
    Receive,
    ReceiveNorms,
    ReceiveTied,
    Reduce,
    Release,
    Reload,
    Send,
    SendNorms,
    SendTied,
    Update,
    format_programs,
    parse,
    parse_programs,
)

COMPUTES = (Forward, Backward, BackwardInput, BackwardWeight, Update)
KINDS = (*COMPUTES, Send, Receive, SendTied, ReceiveTied, SendNorms, ReceiveNorms)
numbers = st.integers(min_value=0, max_value=10**6)
actions = st.builds(lambda kind, *fields: kind(*fields), st.sampled_from(KINDS), numbers, numbers, numbers)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Forward(2, 0, 1), "2F0@1"),
        (Backward(2, 0, 1), "2B0@1"),
        (BackwardInput(2, 0, 1), "2I0@1"),
        (BackwardWeight(2, 0, 1), "2W0@1"),
        (Update(2, 3, 1), "2U3<1"),
        (Send(2, 0, 3), "2S0>3"),
        (Receive(3, 0, 2), "3R0<2"),
        (SendTied(0, 1, 3), "0T1>3"),
        (ReceiveTied(3, 1, 0), "3T1<0"),
        (SendNorms(2, 3, 1), "2N3>1"),
        (ReceiveNorms(1, 3, 2), "1N3<2"),
        (Reduce(2, 3), "2A3"),
        (Offload(2, 0), "2H0"),
        (Offload(2, 0, 13), "2H0+13"),
        (Reload(2, 0), "2D0"),
        (Fetch(2, 1), "2G1"),
        (Release(2, 1), "2Q1"),
    ],
)
def test_text_forms(action: Action, text: str) -> None:
    assert str(action) == text
    assert parse(text) == action


@given(actions)
def test_text_round_trip(action: Action) -> None:
    assert parse(str(action)) == action


@given(st.lists(st.lists(actions, max_size=5).map(tuple), min_size=1, max_size=4).map(tuple))
def test_program_round_trip(programs: tuple[tuple[Action, ...], ...]) -> None:
    assert parse_programs(format_programs(programs)) == programs


def test_program_text_is_one_line_per_rank() -> None:
    programs = ((Forward(0, 0, 0), Send(0, 0, 1)), (Receive(1, 0, 0), Forward(1, 0, 0)))

    assert format_programs(programs) == "rank 0: 0F0@0 0S0>1\nrank 1: 1R0<0 1F0@0"
    assert parse_programs("0F0@0 0S0>1\n1R0<0 1F0@0") == programs


@pytest.mark.parametrize(
    "text", ["", "F0@0", "2F0", "2F0@", "2F0@1 ", "2X0@1", "-1F0@0", "2F0<1", "2I0", "2W0<1", "2U3@1", "2S0<3"]
)
def test_text_that_is_no_action(text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse(text)

    assert str(caught.value) == (
        f"cannot read the action {text!r}: expected a form like 2F0@1 (forward), 2B0@1 (backward), 2I0@1 or 2W0@1 "
        "(its input or weight backward), 2U3<1 (update), 2S0>3 (send), 3R0<2 (receive), 0T1>3 or 3T1<0 (gradients of "
        "tied weights), 2N3>1 or 1N3<2 (norms), 2A3 (all-reduce of replicas), 2H0 or 2H0+3 (offload to the host), "
        "2D0 (reload to the device), 2C0@1 (recomputation), 2G1 or 2Q1 (fetch and release of weights)"
    )
