"""The messages of one rank's stages: which tensors, to and from which ranks, and when receives are posted.

Where replicas take microbatches in turn, a message goes from one rank to one rank. Where they split every microbatch,
each holds some of its rows (samples), and a message goes to all replicas of the neighbour stage that hold some of the
same rows, in pieces: scattered where the neighbour has more replicas, gathered where it has fewer.

Laws of this file:
  1. A value that another stage of this rank reads is never sent. It is rounded as if it were.
  2. Receives of an edge are posted in the order of the program, a few ahead of their use.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias, assert_never

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.runtime.batches.microbatches import Microbatch, even_spans
from penstock.runtime.engine.coded_messages import CodedMessages
from penstock.runtime.transport.transport import Edge, Message, PendingMessage, Transport
from penstock.scheduling.actions import Action, Receive, ReceiveNorms, ReceiveTied, Send, SendNorms, SendTied
from penstock.scheduling.lowering import nexts, peer, peers
from penstock.scheduling.schedules import Schedule

_RECEIVES = (Receive, ReceiveTied, ReceiveNorms)

Rows: TypeAlias = tuple[int, int]
"""The first row, and the number of rows."""


class Mailbox:
    """Sends and receives the messages of `rank` while it runs `schedule`, or an evaluation.

    `coded`: encodes activations and their gradients; None sends them over `transport` as they are, as all else.
    """

    def __init__(self, rank: int, schedule: Schedule, transport: Transport, coded: CodedMessages | None) -> None:
        self.rank = rank
        self._transport, self._coded = transport, coded
        self._microbatches: Mapping[int, Microbatch] = {}
        self._due: defaultdict[Edge, deque[Receive | ReceiveTied | ReceiveNorms]] = defaultdict(deque)
        self._awaited: dict[Action, tuple[Edge, ...]] = {}
        """By receive, the edges that its pieces come on, in the order of their rows."""
        self._receives: dict[tuple[Action, Edge], PendingMessage] = {}
        self._arrived: dict[tuple[int, int, int], Message] = {}
        self._leaving: dict[tuple[int, int, int], tuple[Hashable, Mapping[int, Message]]] = {}
        """By stage, microbatch and target: the kind of the message, and its pieces by the rank that receives them."""
        self._use(schedule)

    def _use(self, schedule: Schedule) -> None:
        self._schedule, self._placement, self._trains = schedule, schedule.placement, schedule.guarantees.trains
        self._nexts = {
            (stage, later): nexts(stage, schedule.stages, schedule.skips, later=later)
            for stage in schedule.stages_of(self.rank)
            for later in (False, True)
        }
        """By stage and direction: the stages that it exchanges activations and gradients with."""

    def begin(self, schedule: Schedule, microbatches: Mapping[int, Microbatch], program: Iterable[Action]) -> None:
        """Prepares for `program`, a segment of `schedule`, and posts its first receives. `microbatches`: this
        rank's.
        """
        if schedule is not self._schedule:
            self._use(schedule)
        self._microbatches = microbatches
        self._transport.begin_segment()
        for action in program:
            if isinstance(action, _RECEIVES):
                edges = self._awaited[action] = self._edges_to(action)
                for edge in edges:
                    self._due[edge].append(action)
        for edge, due in self._due.items():
            if due:
                for _ in range(min(len(due), self._transport.ahead(edge))):
                    self._post(edge)

    def collect(self, stage: int, microbatch: int, sources: Sequence[int], *, later: bool) -> Message:
        """Takes the tensors of `microbatch` that came for `stage`, one from each of `sources`, in their order.

        The sources are `later` stages or earlier ones: the neighbour and those of skips.
        """
        others = self._nexts[stage, later]
        if len(others) < 2:
            return self._arrived.pop((stage, microbatch, others[0])) if others else ()
        found = {other: iter(self.take(stage, microbatch, other)) for other in others}
        return tuple([next(found[source]) for source in sources])

    def deal(self, stage: int, microbatch: int, targets: Sequence[int], message: Message, *, later: bool) -> None:
        """Puts each tensor of `message` aside for one of `targets`, which are `later` stages or earlier ones."""
        others = self._nexts[stage, later]
        for other in others:
            chosen = message
            if len(others) > 1:
                chosen = tuple([each for each, target in zip(message, targets, strict=True) if target == other])
            self.put(stage, microbatch, other, chosen)

    def take(self, stage: int, microbatch: int, source: int) -> Message:
        """Takes the message about `microbatch` from stage `source` for `stage`; it is empty before the first stage."""
        return self._arrived.pop((stage, microbatch, source)) if source >= 0 else ()

    def put(self, stage: int, microbatch: int, target: int, message: Message) -> None:
        """Puts `message` aside for the stage `target`: to be taken if it is on this rank, else for a `Send`."""
        if self.rank in self._placement.stages[target]:
            self._arrived[target, microbatch, stage] = message if self._coded is None else self._coded.pass_on(message)
            return
        # Now, since a backward of the rank's first stage drops the microbatch.
        kind = self._kind(stage, target, microbatch)
        if self._placement.split:
            pieces = self._scatter(stage, microbatch, target, message)
        else:
            pieces = {self._placement.rank_of(target, microbatch): message}
        self._leaving[stage, microbatch, target] = kind, pieces

    def send(self, action: Send) -> None:
        """Sends the message that was put aside for it."""
        kind, pieces = self._leaving.pop((action.stage, action.microbatch, action.target))
        for rank, message in pieces.items():
            (self._coded or self._transport).send(Edge(self.rank, rank), kind, message)

    def receive(self, action: Receive) -> None:
        """Waits for a message, which `take` then returns."""
        edges = self._awaited.pop(action)
        message = self._receives.pop((action, edges[0])).wait()
        if self._placement.split:
            others = [self._receives.pop((action, edge)).wait() for edge in edges[1:]]
            message = _gather([message, *others], self._joins(action))
        self._arrived[action.stage, action.microbatch, action.source] = message
        for edge in edges:
            self._post(edge)

    def send_values(self, action: SendTied | SendNorms, message: Message) -> None:
        """Sends gradients of weights that two stages share, or norms, to every rank that receives them."""
        for rank in peers(action, self.rank, self._placement):
            self._transport.send(Edge(self.rank, rank), self._values_kind(action), message)

    def receive_values(self, action: ReceiveTied | ReceiveNorms) -> Message:
        """Waits for gradients of weights that two stages share, or for norms."""
        (edge,) = self._awaited.pop(action)
        message = self._receives.pop((action, edge)).wait()
        self._post(edge)
        return message

    def ready(self, action: Receive | ReceiveTied | ReceiveNorms) -> bool:
        """Whether the message has come."""
        edges = self._awaited[action]
        if len(edges) == 1:
            return self._receives[action, edges[0]].ready()
        return all([self._receives[action, edge].ready() for edge in edges])

    def _post(self, edge: Edge) -> None:
        """Posts the next receive that is due on `edge`, if there is one."""
        if due := self._due[edge]:
            action = due.popleft()
            post = self._transport.post
            match action:
                case Receive(stage, microbatch, source):
                    kind, post = self._kind(source, stage, microbatch), (self._coded or self._transport).post
                case ReceiveTied() | ReceiveNorms():
                    kind = self._values_kind(action)
                case _:
                    assert_never(action)
            self._receives[action, edge] = post(edge, kind)

    def _edges_to(self, action: Receive | ReceiveTied | ReceiveNorms) -> tuple[Edge, ...]:
        if isinstance(action, Receive) and self._placement.split:
            sources = self._rows(action.stage, action.source, action.microbatch)
            return tuple(Edge(source, self.rank) for source in sources)
        return (Edge(peer(action, self.rank, self._placement), self.rank),)

    def _kind(self, source: int, target: int, microbatch: int) -> Hashable:
        return (source, target, self._trains, self._microbatches[microbatch].signature)

    def _values_kind(self, action: SendTied | ReceiveTied | SendNorms | ReceiveNorms) -> Hashable:
        match action:
            case SendTied(stage, version, target) | ReceiveTied(target, version, stage):
                # A replica without a microbatch has no gradients; its partner has none either, so both use one header.
                own = stage if self.rank in self._placement.stages[stage] else target
                return ("tied", stage, target, self._schedule.last_microbatch(self.rank, own, version) is None)
            case SendNorms(stage, _, target) | ReceiveNorms(target, _, stage):
                return ("norms", stage, target)
            case _:
                assert_never(action)

    def _joins(self, action: Receive) -> bool:
        """Whether the pieces of this message are joined on some replica, and then on all.

        Joined pieces lie in memory in the order of their dimensions, and what a layer computes may depend on that: the
        numbers must not depend on which rows happen to come in one piece.
        """
        here, there = (self._placement.replicas(stage) for stage in (action.stage, action.source))
        return here != there and (there > 1 or action.source > action.stage)

    def _scatter(self, stage: int, microbatch: int, target: int, message: Message) -> dict[int, Message]:
        """Cuts `message` into pieces, by the rank that receives them."""
        samples = self._microbatches[microbatch].samples
        for tensor in message:
            if tensor is not None and (tensor.ndim == 0 or tensor.shape[0] != samples):
                raise PenstockError(
                    f"stage {stage} makes a tensor of shape {tuple(tensor.shape)} for stage {target} out of {samples} "
                    "sample(s): expected the samples as its dimension 0, since the replicas of the stages split them. "
                    "Plan with routing 'round-robin', or cut the model elsewhere"
                )
        return {
            rank: tuple(_narrow(tensor, start, size) for tensor in message)
            for rank, (start, size) in self._rows(stage, target, microbatch).items()
        }

    def _rows(self, stage: int, other: int, microbatch: int) -> dict[int, Rows]:
        """The ranks of `other` that hold rows of this rank's slice of `microbatch`, and the rows within the slice."""
        here, there = self._placement.stages[stage], self._placement.stages[other]
        whole = self._microbatches[microbatch].microbatch_samples
        (own,) = [span for rank, span in zip(here, even_spans(whole, len(here)), strict=True) if rank == self.rank]
        return {
            rank: (max(own.start, span.start) - own.start, size)
            for rank, span in zip(there, even_spans(whole, len(there)), strict=True)
            if (size := min(own.stop, span.stop) - max(own.start, span.start)) > 0
        }


def _narrow(tensor: Tensor | None, start: int, size: int) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.detach().narrow(0, start, size).requires_grad_(tensor.requires_grad)


def _gather(messages: Sequence[Message], joins: bool) -> Message:
    """Joins the pieces of a message that came from several ranks. A single piece is copied only if `joins`."""
    if len(messages) == 1 and not joins:
        return messages[0]
    columns = zip(*messages, strict=True)
    return tuple(None if not any(piece is not None for piece in column) else _join(column) for column in columns)


def _join(pieces: Sequence[Tensor | None]) -> Tensor:
    tensors = [piece for piece in pieces if piece is not None]
    if len(tensors) < len(pieces):
        raise PenstockError(
            "some replicas of a stage have a gradient for the rows that they took of a microbatch, and others have "
            "none: expected that all or none have one. The model uses a value for some data only: plan with routing "
            "'round-robin', or add the value times zero to a result"
        )
    whole = torch.cat([tensor.detach() for tensor in tensors])
    return whole.requires_grad_(tensors[0].requires_grad)
