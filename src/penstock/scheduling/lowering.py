"""Lowering: from what each rank computes to what it computes, sends and receives.

Orders say nothing of communication, so no order can get it wrong: this one pass derives all of it.

Rules of this file:
  1. It is the only place that creates messages (`Send`, `SendTied`, `SendNorms`, and their receives) and `Reduce`.
  2. A receive stands directly before the action that consumes it, a send directly after the action that makes it: a
     gradient leaves after the input part of a split backward, and the weight part has no messages. (`arrivals` may put
     a receive further ahead.)
  3. Only adjacent stages and those of a skip exchange activations and gradients, and no message passes between stages
     of one rank. What has no skip rides along with the rest. The neighbor's message leaves first: most ranks wait for
     it.
  4. Stages that share weights exchange their gradients of them before they update, replica by replica. A rank sends for
     all its updates before it waits for any, so that no two ranks wait for each other.
  5. The replicas of a stage sum their gradients before they update, and before their norm is sent.
  6. Where an update comes later than its gradients, what it waits for is sent when these are there and received before
     it. Between neighbors (and over a skip) this must keep its place among activations and gradients, since an edge is
     a queue: what goes to an earlier stage is received when its own gradients are there, and what goes to a later one
     is sent before the update.
  7. It looks at one action, mark, or run of updates at a time: lowering a step or a whole program comes to the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import assert_never

from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    Receive,
    ReceiveNorms,
    ReceiveTied,
    Reduce,
    Send,
    SendNorms,
    SendTied,
    Update,
)
from penstock.scheduling.definitions import Entry, LastUpdate, NormRule, Summed
from penstock.scheduling.placements import Placement, Skip

__all__ = ["counterpart", "lower", "lower_row", "nexts", "partners", "peer", "peers"]


def lower(
    programs: Iterable[Iterable[Entry]],
    placement: Placement,
    ties: Sequence[Sequence[int]] = (),
    norms: NormRule = NormRule.NONE,
    deferred: frozenset[int] = frozenset(),
    skips: Sequence[Skip] = (),
) -> tuple[tuple[Action, ...], ...]:
    """The programs (one row of actions per rank) with their messages.

    `ties`: groups of stages that share weights. `norms`: whose norms of gradients an update needs. `deferred`: the
    stages whose updates come later than their gradients, which a mark says are there. `skips`: the pairs of stages,
    others between them, that exchange activations and gradients directly.
    """
    return tuple(lower_row(row, rank, placement, ties, norms, deferred, skips) for rank, row in enumerate(programs))


def lower_row(
    row: Iterable[Entry],
    rank: int,
    placement: Placement,
    ties: Sequence[Sequence[int]] = (),
    norms: NormRule = NormRule.NONE,
    deferred: frozenset[int] = frozenset(),
    skips: Sequence[Skip] = (),
) -> tuple[Action, ...]:
    """The row of `rank` with its messages."""
    return tuple(_Lowering(rank, placement, ties, norms, deferred, skips).lower(row))


def partners(stage: int, ties: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The stages that share weights with `stage`, ascending."""
    return tuple(sorted({other for group in ties if stage in group for other in group} - {stage}))


def nexts(stage: int, stages: int, skips: Iterable[Skip], *, later: bool) -> tuple[int, ...]:
    """The stages that `stage`, of `stages`, exchanges activations and gradients with: later ones, or if not
    `later` earlier ones. The neighbor first.
    """
    neighbor = stage + 1 if later else stage - 1
    far = [b if later else a for a, b in skips if stage == (a if later else b)]
    return (*((neighbor,) if 0 <= neighbor < stages else ()), *sorted(far, reverse=not later))


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
        case SendNorms(stage, version, target):
            return ReceiveNorms(target, version, stage)
        case ReceiveNorms(stage, version, source):
            return SendNorms(source, version, stage)
        case _:
            assert_never(message)


def peer(message: Message, rank: int, placement: Placement) -> int:
    """The other rank of a message in the row of `rank`; the first one, if there are several."""
    match message:
        case Send(_, microbatch, other) | Receive(_, microbatch, other):
            return placement.rank_of(other, microbatch)
        case SendTied(stage, _, other) | ReceiveTied(stage, _, other):
            return placement.peer_replica(stage, other, rank)
        case SendNorms(stage, _, other) | ReceiveNorms(stage, _, other):
            return placement.peer_replica(stage, other, rank)
        case _:
            assert_never(message)


def peers(message: Message, rank: int, placement: Placement) -> tuple[int, ...]:
    """The other ranks of a message in the row of `rank`, those that share a microbatch aside.

    Norms go from replica i mod r of a stage of r replicas to replica i of its neighbor: to none, one or several ranks.
    """
    if isinstance(message, SendNorms):
        return placement.peer_replicas(message.stage, message.target, rank)
    return (peer(message, rank, placement),)


@dataclass(frozen=True, slots=True)
class _Lowering:
    rank: int
    placement: Placement
    ties: Sequence[Sequence[int]]
    norms: NormRule
    deferred: frozenset[int]
    skips: Sequence[Skip]
    known: dict[tuple[int, bool], tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """What `_ends` has found: every action asks for it."""

    def lower(self, row: Iterable[Entry]) -> Iterator[Action]:
        for together, entries in groupby(row, key=_is_update):
            if together:
                yield from self._lower_updates([entry for entry in entries if isinstance(entry, Update)])
                continue
            for entry in entries:
                match entry:
                    case Forward() | Backward() | BackwardInput():
                        # A worker lowers every step anew, and these are nearly all of it.
                        stage, microbatch = entry.stage, entry.microbatch
                        sources, targets = self._ends(stage, later=isinstance(entry, Forward))
                        for source in sources:
                            yield Receive(stage, microbatch, source)
                        yield entry
                        for target in targets:
                            yield Send(stage, microbatch, target)
                    case BackwardWeight():
                        yield entry
                    case Summed(stage, version):
                        yield from self._leave(stage, version)
                    case LastUpdate(stage, version):
                        yield from self._hear(stage, version)
                    case Update():
                        raise AssertionError("updates come in runs of their own")
                    case _:
                        assert_never(entry)

    def _ends(self, stage: int, *, later: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """On other ranks: where a forward (`later`) or backward gets what it needs from, and who needs what it makes:
        later stages or earlier ones.
        """
        known = self.known.get((stage, later))
        if known is None:
            sources, targets = (
                tuple(other for other in self._nexts(stage, later=side) if self._is_apart(other))
                for side in (not later, later)
            )
            known = self.known[stage, later] = sources[::-1], targets
        return known

    def _lower_updates(self, updates: Sequence[Update]) -> Iterator[Action]:
        """A run of updates and what they wait for; `updates` at once only if all of them know the norms of all."""
        targets = sorted(
            (target, update.stage, update.version)
            for update in updates
            for target in self._partners(update.stage)
            if update.stage not in self.deferred or self._is_late(update.stage, target)
        )
        for target, stage, version in targets:
            yield SendTied(stage, version, target)
        if self.norms is not NormRule.ALL:
            for update in updates:
                yield from self._settle(update)
                yield from self._exchange(update)
            return
        for update in updates:
            yield from self._settle(update)
        ascending = sorted(updates, key=lambda update: (update.version, update.stage))
        for update in reversed(ascending):
            if update.stage not in self.deferred:
                yield from self._tell_earlier(update.stage, update.version)
        for update in ascending:
            if self._is_apart(update.stage - 1):
                yield ReceiveNorms(update.stage, update.version, update.stage - 1)
            yield from self._tell(update.stage, update.version, update.stage + 1)
        yield from updates

    def _exchange(self, update: Update) -> Iterator[Action]:
        """The update, and the norms that stages send each other around it, without waiting for an earlier stage."""
        stage, version = update.stage, update.version
        if self.norms is NormRule.LAGGED:
            yield from self._tell_earlier(stage, version)
            yield from self._tell(stage, version, stage + 1)
        yield update
        if self.norms is NormRule.LAGGED:
            yield from self._hear(stage, version - 1)

    def _leave(self, stage: int, version: int) -> Iterator[Action]:
        """What a deferred update of `stage` can send and receive as soon as its gradients are there."""
        others = self._partners(stage)
        for target in others:
            if not self._is_late(stage, target):
                yield SendTied(stage, version, target)
        for source in others:
            if self._is_early(stage, source):
                yield ReceiveTied(stage, version, source)
        if not others and self.placement.replicas(stage) > 1:
            yield Reduce(stage, version)
        if self.norms is NormRule.ALL:
            yield from self._tell_earlier(stage, version)

    def _settle(self, update: Update) -> Iterator[Action]:
        """What must still come before the gradients of `update` are whole."""
        stage, version = update.stage, update.version
        others, deferred = self._partners(stage), stage in self.deferred
        for source in others:
            if not (deferred and self._is_early(stage, source)):
                yield ReceiveTied(stage, version, source)
        if self.placement.replicas(stage) > 1 and (others or not deferred):
            yield Reduce(stage, version)

    def _is_late(self, stage: int, target: int) -> bool:
        """Whether what a deferred update sends to `target` keeps its place before the activations of a minibatch."""
        return target in self._nexts(stage, later=True)

    def _is_early(self, stage: int, source: int) -> bool:
        """Whether a deferred update receives at once what `source` sends: a stage that sends it gradients too, or one
        whose gradients belong to the norm that is to leave."""
        return source in self._nexts(stage, later=True) or (source > stage and self.norms is NormRule.ALL)

    def _tell_earlier(self, stage: int, version: int) -> Iterator[Action]:
        """Adds the norm of `stage` to those of later stages, and passes them on to the stage before it."""
        if self._is_apart(stage + 1):
            yield ReceiveNorms(stage, version, stage + 1)
        yield from self._tell(stage, version, stage - 1)

    def _tell(self, stage: int, version: int, target: int) -> Iterator[Action]:
        if self._is_apart(target):
            yield SendNorms(stage, version, target)

    def _hear(self, stage: int, version: int) -> Iterator[Action]:
        """What the stage before it knew at its update to `version`: that leaves before the next activation does."""
        if version > 0 and self._is_apart(stage - 1):
            yield ReceiveNorms(stage, version, stage - 1)

    def _nexts(self, stage: int, *, later: bool) -> tuple[int, ...]:
        return nexts(stage, len(self.placement.stages), self.skips, later=later)

    def _partners(self, stage: int) -> tuple[int, ...]:
        """Those on other ranks."""
        return tuple(partner for partner in partners(stage, self.ties) if not self._holds(partner))

    def _is_apart(self, neighbor: int) -> bool:
        return 0 <= neighbor < len(self.placement.stages) and not self._holds(neighbor)

    def _holds(self, stage: int) -> bool:
        return self.rank in self.placement.stages[stage]


def _is_update(entry: Entry) -> bool:
    return isinstance(entry, Update)
