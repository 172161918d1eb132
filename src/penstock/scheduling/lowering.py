"""Lowering: from what each rank computes to what it computes, sends and receives.

Orders say nothing of communication, so no order can get it wrong: this one pass derives all of it.

Laws of this file:
  1. It is the only place that creates `Send` and `Receive`.
  2. A receive stands directly before the action that consumes it, a send directly after the action that makes it.
  3. Only adjacent stages talk, and not at all when they share a rank; what skips a stage rides along with the rest.
  4. It looks at one action at a time, so lowering a step or a whole program comes to the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

from penstock.scheduling.actions import Action, Backward, Compute, Forward, Receive, Send, Update

__all__ = ["lower"]


def lower(programs: Iterable[Iterable[Compute]], placement: Sequence[int]) -> tuple[tuple[Action, ...], ...]:
    """The programs (one row of actions per rank) with sends and receives; `placement[stage]` is the rank of a stage."""
    return tuple(tuple(_lower_row(row, placement)) for row in programs)


def _lower_row(row: Iterable[Compute], placement: Sequence[int]) -> Iterator[Action]:
    for action in row:
        match action:
            case Forward(stage, microbatch):
                source, target = stage - 1, stage + 1
            case Backward(stage, microbatch):
                source, target = stage + 1, stage - 1
            case Update():
                yield action
                continue
            case _:
                assert_never(action)
        if _apart(source, stage, placement):
            yield Receive(stage, microbatch, source)
        yield action
        if _apart(target, stage, placement):
            yield Send(stage, microbatch, target)


def _apart(neighbour: int, stage: int, placement: Sequence[int]) -> bool:
    return 0 <= neighbour < len(placement) and placement[neighbour] != placement[stage]
