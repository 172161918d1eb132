"""Lowering: sends and receives, derived."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduling.actions import Compute, Receive, Send, format_programs, parse_programs
from penstock.scheduling.definitions import Drain, PipelineShape, Step
from penstock.scheduling.lowering import lower
from penstock.scheduling.orders import GPIPE, INTERLEAVED, PIPEDREAM, TWO_BW
from penstock.scheduling.placements import Placement


def test_three_ranks() -> None:
    programs = parse_programs(
        """
        0F0@0 0B0@0 0U1<0
        1F0@0 1B0@0 1U1<0
        2F0@0 2B0@0 2U1<0
        """
    )

    assert format_programs(lower(programs, Placement.straight(3))) == (
        "rank 0: 0F0@0 0S0>1 0R0<1 0B0@0 0U1<0\n"
        "rank 1: 1R0<0 1F0@0 1S0>2 1R0<2 1B0@0 1S0>0 1U1<0\n"
        "rank 2: 2R0<1 2F0@0 2B0@0 2S0>1 2U1<0"
    )


def test_stages_that_wrap_round() -> None:
    programs = parse_programs("0F0@0 2F0@0 2B0@0 0B0@0\n1F0@0 3F0@0 3B0@0 1B0@0")

    assert format_programs(lower(programs, Placement.straight(2, 2))) == (
        "rank 0: 0F0@0 0S0>1 2R0<1 2F0@0 2S0>3 2R0<3 2B0@0 2S0>1 0R0<1 0B0@0\n"
        "rank 1: 1R0<0 1F0@0 1S0>2 3R0<2 3F0@0 3B0@0 3S0>2 1R0<2 1B0@0 1S0>0"
    )


def test_neighbours_on_one_rank_do_not_talk() -> None:
    alone = parse_programs("0F0@0 1F0@0 2F0@0 2B0@0 1B0@0 0B0@0")
    folded = parse_programs("0F0@0 3F0@0\n1F0@0 2F0@0")  # a placement that turns back, as in zb-v

    assert lower(alone, Placement.straight(1, 3)) == alone
    assert format_programs(lower(folded, Placement(((0,), (1,), (1,), (0,))))) == (
        "rank 0: 0F0@0 0S0>1 3R0<2 3F0@0\nrank 1: 1R0<0 1F0@0 2F0@0 2S0>3"
    )


def test_one_stage_has_no_messages() -> None:
    programs = parse_programs("0F0@0 0B0@0 0U1<0")

    assert lower(programs, Placement.straight(1)) == programs


@given(
    st.sampled_from([GPIPE, PIPEDREAM, TWO_BW, INTERLEAVED]), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3)
)
def test_lowering_adds_messages_only_and_each_beside_its_action(method, ranks, factor, minibatch) -> None:
    shape = PipelineShape(Placement.straight(ranks, factor if method.layout.has_several else 1), ranks * factor)
    for part in (Step(minibatch), Drain(minibatch)):
        programs = [tuple(method.order(shape, rank, part)) for rank in range(ranks)]
        lowered = lower(programs, shape.placement)

        assert [tuple(a for a in row if not isinstance(a, Send | Receive)) for row in lowered] == programs
        for row in lowered:
            for before, action, after in zip((None, *row), row, (*row[1:], None), strict=False):
                if isinstance(action, Receive):
                    assert isinstance(after, Compute) and _concerns(after, action, action.source)
                if isinstance(action, Send):
                    assert isinstance(before, Compute) and _concerns(before, action, 2 * action.stage - action.target)


def _concerns(compute, message, source: int) -> bool:
    letter = "F" if source < message.stage else "B"
    return str(compute).startswith(f"{message.stage}{letter}{message.microbatch}@")


@pytest.mark.parametrize("method", [GPIPE, PIPEDREAM, TWO_BW])
def test_lowering_parts_is_lowering_the_whole(method) -> None:
    shape = PipelineShape(Placement.straight(3), 4)
    parts = [*(Step(minibatch) for minibatch in range(3)), Drain(3)]
    rows = [[action for part in parts for action in method.order(shape, rank, part)] for rank in range(3)]
    pieces = [lower([method.order(shape, rank, part) for rank in range(3)], shape.placement) for part in parts]

    joined = tuple(tuple(action for piece in pieces for action in piece[rank]) for rank in range(3))
    assert lower(rows, shape.placement) == joined
