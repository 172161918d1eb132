"""Lowering: from what each rank computes to what it computes, sends and receives.

Orders say nothing of communication, so no order can get it wrong: this one pass derives all of it.

Laws of this file:
  1. It is the only place that creates messages (`Send`, `Receive`, `SendTied`, `ReceiveTied`) and `Reduce`.
  2. A receive stands directly before the action that consumes it, a send directly after the action that makes it.
  3. Only adjacent stages exchange activations and gradients, and no message passes between stages of one rank; what
     skips a stage rides along with the rest.
  4. Stages that share weights exchange their gradients of them before they update, replica by replica. A rank sends for
     all its updates before it waits for any, so that no two ranks wait for each other.
  5. The replicas of a stage sum their gradients directly before they update.
  6. It looks at one action, or one run of updates, at a time: lowering a step or a whole program comes to the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    Reduce,
    Send,
    SendTied,
    Update,
)
from penstock.scheduling.placements import Placement

__all__ = ["counterpart", "lower", "lower_row", "partners", "peer"]


def lower(
    programs: Iterable[Iterable[Compute]], placement: Placement, ties: Sequence[Sequence[int]] = ()
) -> tuple[tuple[Action, ...], ...]:
    """The programs (one row of actions per rank) with their messages.

    `ties`: groups of stages that share weights.
    """
    return tuple(lower_row(row, rank, placement, ties) for rank, row in enumerate(programs))


def lower_row(
    row: Iterable[Compute], rank: int, placement: Placement, ties: Sequence[Sequence[int]] = ()
) -> tuple[Action, ...]:
    """The row of `rank` with its messages."""
    return tuple(_Lowering(rank, placement, ties).lower(row))


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


def peer(message: Message, rank: int, placement: Placement) -> int:
    """The other rank of a message in the row of `rank`; the first one, if replicas share the microbatch."""
    match message:
        case Send(_, microbatch, other) | Receive(_, microbatch, other):
            return placement.rank_of(other, microbatch)
        case SendTied(stage, _, other) | ReceiveTied(stage, _, other):
            return placement.beside(stage, other, rank)
        case _:
            assert_never(message)


@dataclass(frozen=True, slots=True)
class _Lowering:
    rank: int
    placement: Placement
    ties: Sequence[Sequence[int]]

    def lower(self, row: Iterable[Compute]) -> Iterator[Action]:
        for _, run in groupby(row, key=lambda action: isinstance(action, Update)):
            actions = list(run)
            yield from self._share([action for action in actions if isinstance(action, Update)])
            for action in actions:
                yield from self._lower_action(action)

    def _share(self, updates: Sequence[Update]) -> Iterator[Action]:
        """What the stages of `updates` send to their partners, in the order in which these take it."""
        targets = sorted(
            (target, update.stage, update.version)
            for update in updates
            for target in partners(update.stage, self.ties)
            if not self._holds(target)
        )
        for target, stage, version in targets:
            yield SendTied(stage, version, target)

    def _lower_action(self, action: Compute) -> Iterator[Action]:
        match action:
            case Forward(stage, microbatch):
                source, target = stage - 1, stage + 1
            case Backward(stage, microbatch):
                source, target = stage + 1, stage - 1
            case Update(stage, version):
                for partner in partners(stage, self.ties):
                    if not self._holds(partner):
                        yield ReceiveTied(stage, version, partner)
                if self.placement.replicas(stage) > 1:
                    yield Reduce(stage, version)
                yield action
                return
            case _:
                assert_never(action)
        if self._is_apart(source):
            yield Receive(stage, microbatch, source)
        yield action
        if self._is_apart(target):
            yield Send(stage, microbatch, target)

    def _is_apart(self, neighbour: int) -> bool:
        return 0 <= neighbour < len(self.placement.stages) and not self._holds(neighbour)

    def _holds(self, stage: int) -> bool:
        return self.rank in self.placement.stages[stage]
