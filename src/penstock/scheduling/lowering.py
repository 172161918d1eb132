"""Lowering: adds the messages to what each rank computes.

Orders contain no communication, so an order cannot get it wrong: this one pass derives all of it.

Rules of this file:
  1. Only this file creates messages (`Send`, `SendTied`, `SendNorms`, and their receives), `Reduce` and `Recompute`.
  2. A receive is directly before the action that uses it, and a send is directly after the action that makes its value.
     The gradient of a split backward is sent after the input backward; the weight backward has no messages.
  3. Only adjacent stages and the two stages of a skip exchange activations and gradients. Stages of one rank send each
     other nothing. A value without a skip is relayed in the messages of the stages between. The message to the neighbor
     is sent first, because most ranks wait for that one.
  4. Stages that share weights exchange the gradients of these weights before they update, replica by replica. A rank
     sends for all its updates before it receives for any, so that no two ranks wait for each other.
  5. The replicas of a stage sum their gradients before they update, and before they send their norm.
  6. A deferred update comes later than its gradients. Its messages are sent when its gradients are complete and
     received before the update, except between neighbors (and over a skip): there they share queues with activations
     and gradients and must keep their place. A message to an earlier stage is received when that stage's own gradients
     are complete, and a message to a later stage is sent just before the update.
  7. A recomputation is before the receives of its backward, so that it fills the wait for them. A backward that
     directly follows its forward has none: what the forward made is still there.
  8. The pass looks at one action, mark, or run of updates at a time, so that lowering step by step gives the same as
     lowering a whole program.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from penstock.errors import ScheduleError
from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    HostCopy,
    InputGradients,
    Message,
    Offload,
    Receive,
    ReceiveNorms,
    ReceiveTied,
    Receiving,
    Recompute,
    Reduce,
    Reload,
    Send,
    Sending,
    SendNorms,
    SendTied,
    Update,
)
from penstock.scheduling.definitions import Entry, Summed
from penstock.scheduling.placements import Placement, Skip


def lower(
    programs: Iterable[Iterable[Entry]],
    placement: Placement,
    *,
    ties: Sequence[Sequence[int]] = (),
    norms: bool = False,
    deferred: frozenset[int] = frozenset(),
    skips: Sequence[Skip] = (),
    recomputed: frozenset[int] = frozenset(),
) -> tuple[tuple[Action, ...], ...]:
    """The programs (one row of actions per rank) with their messages.

    `ties`: groups of stages that share weights. `norms`: whether an update needs the norms of all stages. `deferred`:
    the stages whose updates come later than their gradients; a mark shows when the gradients are complete. `skips`: the
    pairs of stages that are not adjacent and exchange activations and gradients directly. `recomputed`: the stages that
    keep nothing but their input.
    """
    return tuple(
        tuple(
            Lowering(
                rank, placement, ties=ties, norms=norms, deferred=deferred, skips=skips, recomputed=recomputed
            ).lower(row)
        )
        for rank, row in enumerate(programs)
    )


def partners(stage: int, ties: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The stages that share weights with `stage`, ascending."""
    return tuple(sorted({other for group in ties if stage in group for other in group} - {stage}))


def nexts(stage: int, stages: int, skips: Iterable[Skip], *, later: bool) -> tuple[int, ...]:
    """The later (or, if not `later`, earlier) stages that `stage` exchanges activations and gradients with.

    The neighbor is the first. `stages` is the number of all stages.
    """
    neighbor = stage + 1 if later else stage - 1
    far = [b if later else a for a, b in skips if stage == (a if later else b)]
    return (*((neighbor,) if 0 <= neighbor < stages else ()), *sorted(far, reverse=not later))


def counterpart(message: Message) -> Message:
    """The other end of a message: a receive for a send, a send for a receive."""
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
    """The other rank of a message in the row of `rank`; the first one if there are several."""
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
    """The other ranks of a message in the row of `rank`; of replicas that share a microbatch, the first.

    Replica i mod r of a stage of r replicas sends its norms to replica i of the neighbor: to none, one or several
    ranks.
    """
    if isinstance(message, SendNorms):
        return placement.peer_replicas(message.stage, message.target, rank)
    return (peer(message, rank, placement),)


@dataclass(frozen=True, slots=True)
class Lowering:
    """Adds the messages to the row of `rank`, segment by segment; see `lower`."""

    rank: int
    placement: Placement
    ties: Sequence[Sequence[int]]
    norms: bool
    deferred: frozenset[int]
    skips: Sequence[Skip]
    recomputed: frozenset[int]
    known: dict[tuple[type[Entry], int], tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """The results of `_ends`, by kind of entry and stage."""

    def lower(self, row: Iterable[Entry]) -> list[Action]:
        made: list[Action] = []
        append = made.append
        updates: list[Update] = []
        known, recomputed = self.known, self.recomputed
        latest: tuple[int, int] | None = None
        for entry in row:
            # A worker lowers every step again, and nearly all entries are forwards and backwards.
            kind, stage = type(entry), entry.stage
            ends = known.get((kind, stage))
            if ends is None:
                ends = known[kind, stage] = self._ends(entry)
            if updates and kind is not Update:
                made.extend(self._lower_updates(updates))
                updates = []
            match entry:
                case Forward() | Backward() | BackwardInput() | BackwardWeight() | Offload() | Reload():
                    sources, targets = ends
                    if recomputed and not isinstance(entry, HostCopy):
                        number = entry.microbatch
                        if isinstance(entry, InputGradients) and stage in recomputed and latest != (stage, number):
                            append(Recompute(stage, number, entry.version))
                        latest = (stage, number) if kind is Forward else None
                    for source in sources:
                        append(Receive(stage, entry.microbatch, source))
                    append(entry)
                    for target in targets:
                        append(Send(stage, entry.microbatch, target))
                case Update():
                    latest = None
                    updates.append(entry)
                case Summed(stage, version):
                    made.extend(self._leave(stage, version))
                case _:
                    assert_never(entry)
        if updates:
            made.extend(self._lower_updates(updates))
        return made

    def _ends(self, entry: Entry) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The stages on other ranks that such an entry of its stage receives from and sends to."""
        stages = len(self.placement.stages)
        if entry.stage >= stages:
            raise ScheduleError(
                f"rank {self.rank}: {entry}: expected a stage from 0 to {stages - 1}, found {entry.stage}: give a "
                "stage of the placement, or a placement of more stages"
            )
        if not isinstance(entry, Forward | Backward | BackwardInput):
            return (), ()
        later = isinstance(entry, Forward)
        sources, targets = (
            tuple(other for other in self._nexts(entry.stage, later=side) if self._is_apart(other))
            for side in (not later, later)
        )
        return sources[::-1], targets

    def _lower_updates(self, updates: Sequence[Update]) -> Iterator[Action]:
        """A run of updates with their messages; if updates need norms, all messages come before them."""
        targets = sorted(
            (target, update.stage, update.version)
            for update in updates
            for target in self._partners(update.stage)
            if update.stage not in self.deferred or self._is_late(update.stage, target)
        )
        for target, stage, version in targets:
            yield SendTied(stage, version, target)
        if not self.norms:
            for update in updates:
                yield from self._settle(update)
                yield update
            return
        for update in updates:
            yield from self._settle(update)
        ascending = sorted(updates, key=lambda update: (update.version, update.stage))
        for update in reversed(ascending):
            if update.stage not in self.deferred:
                yield from self._send_norms_back(update.stage, update.version)
        for update in ascending:
            if self._is_apart(update.stage - 1):
                yield ReceiveNorms(update.stage, update.version, update.stage - 1)
            yield from self._send_norms(update.stage, update.version, update.stage + 1)
        yield from updates

    def _leave(self, stage: int, version: int) -> Iterator[Action]:
        """The messages of a deferred update that can pass as soon as the gradients of `stage` are complete."""
        others = self._partners(stage)
        for target in others:
            if not self._is_late(stage, target):
                yield SendTied(stage, version, target)
        for source in others:
            if self._is_early(stage, source):
                yield ReceiveTied(stage, version, source)
        if not others and self.placement.replicas(stage) > 1:
            yield Reduce(stage, version)
        if self.norms:
            yield from self._send_norms_back(stage, version)

    def _settle(self, update: Update) -> Iterator[Action]:
        """The receives and the all-reduce that complete the gradients of `update`."""
        stage, version = update.stage, update.version
        others, deferred = self._partners(stage), stage in self.deferred
        for source in others:
            if not (deferred and self._is_early(stage, source)):
                yield ReceiveTied(stage, version, source)
        if self.placement.replicas(stage) > 1 and (others or not deferred):
            yield Reduce(stage, version)

    def _is_late(self, stage: int, target: int) -> bool:
        """Whether a deferred update sends to `target` just before it: the next activations use the same queue."""
        return target in self._nexts(stage, later=True)

    def _is_early(self, stage: int, source: int) -> bool:
        """Whether a deferred update receives from `source` as soon as the gradients of `stage` are complete.

        It does if `source` also sends its gradients to `stage`, or if the norm to send includes those of `source`.
        """
        return source in self._nexts(stage, later=True) or (source > stage and self.norms)

    def _send_norms_back(self, stage: int, version: int) -> Iterator[Action]:
        """Receives the norms of later stages, and sends them with that of `stage` to the stage before it."""
        if self._is_apart(stage + 1):
            yield ReceiveNorms(stage, version, stage + 1)
        yield from self._send_norms(stage, version, stage - 1)

    def _send_norms(self, stage: int, version: int, target: int) -> Iterator[Action]:
        if self._is_apart(target):
            yield SendNorms(stage, version, target)

    def _nexts(self, stage: int, *, later: bool) -> tuple[int, ...]:
        return nexts(stage, len(self.placement.stages), self.skips, later=later)

    def _partners(self, stage: int) -> tuple[int, ...]:
        """The stages on other ranks that share weights with `stage`."""
        return tuple(partner for partner in partners(stage, self.ties) if not self._holds(partner))

    def _is_apart(self, neighbor: int) -> bool:
        return 0 <= neighbor < len(self.placement.stages) and not self._holds(neighbor)

    def _holds(self, stage: int) -> bool:
        return self.rank in self.placement.stages[stage]


def sources_of(row: Iterable[Action], rank: int, placement: Placement) -> tuple[int, ...]:
    """The ranks that the `row` of `rank` receives from, ascending."""
    receives = (action for action in row if isinstance(action, Receiving))
    return tuple(sorted({peer(action, rank, placement) for action in receives}))


def follow_sends(
    row: Iterable[Action], rank: int, placement: Placement, others: Mapping[int, Iterable[Action]]
) -> Iterator[Action]:
    """The `row` of `rank`, with its receives from each rank of `others` in the order of the sends.

    `others` has rows by rank. A receive without a send stays where it is; the verifier finds it.
    """
    queues = {source: _sent(other, source, rank, placement) for source, other in others.items()}
    early: set[Action] = set()
    for action in row:
        if not isinstance(action, Receiving):
            yield action
        elif action in early:
            early.remove(action)
        else:
            for message in queues[peer(action, rank, placement)]:
                if message == action:
                    break
                early.add(message)
                yield message
            yield action


def _sent(row: Iterable[Action], source: int, rank: int, placement: Placement) -> Iterator[Action]:
    """The receives on `rank` of the messages that the row of `source` sends to it."""
    for action in row:
        if isinstance(action, Sending) and rank in peers(action, source, placement):
            yield counterpart(action)
