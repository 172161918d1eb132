"""Lowering: from what each rank computes to what it computes, sends and receives.

Orders say nothing of communication, so no order can get it wrong: this one pass derives all of it.

Laws of this file:
  1. It is the only place that creates messages: `Send`, `Receive`, `SendTied`, `ReceiveTied`.
  2. A receive stands directly before the action that consumes it, a send directly after the action that makes it.
  3. Only adjacent stages exchange activations and gradients, and no message passes between stages of one rank; what
     skips a stage rides along with the rest.
  4. Stages that share weights exchange their gradients of them before they update. A rank sends for all its updates
     before it waits for any, so that no two ranks wait for each other.
  5. It looks at one action, or one run of updates, at a time: lowering a step or a whole program comes to the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import assert_never

from penstock.scheduling.actions import (
    Action,
    Backward,
    Compute,
    Forward,
    Message,
    Receive,
    ReceiveTied,
    Send,
    SendTied,
    Update,
)

__all__ = ["counterpart", "lower", "partners"]


def lower(
    programs: Iterable[Iterable[Compute]], placement: Sequence[int], ties: Sequence[Sequence[int]] = ()
) -> tuple[tuple[Action, ...], ...]:
    """The programs (one row of actions per rank) with their messages.

    `placement[stage]` is the rank of a stage. `ties`: groups of stages that share weights.
    """
    return tuple(tuple(_lower_row(row, placement, ties)) for row in programs)


def partners(stage: int, ties: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The stages that share weights with `stage`, ascending."""
    return tuple(sorted({other for group in ties if stage in group for other in group} - {stage}))


def counterpart(message: Message) -> Message:
    """The other end of a message: the receive of a send, the send of a receive."""
    match message:
        case Send(stage, microbatch, target):
            return Receive(target, microbatch, stage)
        case Receive(stage, microbatch, source):
            return Send(source, microbatch, stage)
        case SendTied(stage, version, target):
            return ReceiveTied(target, version, stage)
        case ReceiveTied(stage, version, source):
            return SendTied(source, version, stage)
        case _:
            assert_never(message)


def _lower_row(row: Iterable[Compute], placement: Sequence[int], ties: Sequence[Sequence[int]]) -> Iterator[Action]:
    for _, run in groupby(row, key=lambda action: isinstance(action, Update)):
        actions = list(run)
        updates = [action for action in actions if isinstance(action, Update)]
        yield from _share(updates, placement, ties)
        for action in actions:
            yield from _lower_action(action, placement, ties)


def _share(updates: Sequence[Update], placement: Sequence[int], ties: Sequence[Sequence[int]]) -> Iterator[Action]:
    """What the stages of `updates` send to their partners, in the order in which these take it."""
    targets = sorted(
        (target, update.stage, update.version)
        for update in updates
        for target in partners(update.stage, ties)
        if _apart(target, update.stage, placement)
    )
    for target, stage, version in targets:
        yield SendTied(stage, version, target)


def _lower_action(action: Compute, placement: Sequence[int], ties: Sequence[Sequence[int]]) -> Iterator[Action]:
    match action:
        case Forward(stage, microbatch):
            source, target = stage - 1, stage + 1
        case Backward(stage, microbatch):
            source, target = stage + 1, stage - 1
        case Update(stage, version):
            for partner in partners(stage, ties):
                if _apart(partner, stage, placement):
                    yield ReceiveTied(stage, version, partner)
            yield action
            return
        case _:
            assert_never(action)
    if _apart(source, stage, placement):
        yield Receive(stage, microbatch, source)
    yield action
    if _apart(target, stage, placement):
        yield Send(stage, microbatch, target)


def _apart(neighbour: int, stage: int, placement: Sequence[int]) -> bool:
    return 0 <= neighbour < len(placement) and placement[neighbour] != placement[stage]
