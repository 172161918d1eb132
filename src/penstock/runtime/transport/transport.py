"""How tensors get from one rank to another.

The worker speaks to a `Transport` only, and never asks which one it has. Messages on one `Edge` arrive in the order in
which they were sent; that order is the only matching rule (NCCL has no other). A receive is posted before it is needed
and waited for when it is; a send returns at once.

`LoopbackTransport` is the transport of one process: all ranks live in it, a message is a Python reference.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.runtime.devices.staging import HostStaging, Staged, Staging

__all__ = ["ALL", "Edge", "Forms", "LoopbackTransport", "Message", "PendingMessage", "Transport"]

ALL = 2**31
"""More receives than any part of a schedule has."""

Message: TypeAlias = tuple[Tensor | None, ...]
"""Tensors in an order that both ends know. None stands for a gradient that nothing depends on."""

Forms: TypeAlias = Mapping[Hashable, tuple[int, torch.dtype]]
"""What ranks add, by form: how many numbers, and of which type."""


class Edge(NamedTuple):
    """A directed connection between two ranks. Messages on different lanes do not wait for each other."""

    source: int
    target: int
    lane: str = "stages"

    def __str__(self) -> str:
        return f"rank {self.source} -> rank {self.target} ({self.lane})"


class PendingMessage(Protocol):
    """A receive that has been posted."""

    def ready(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> Message:
        """The message. A tensor requires a gradient if the one that was sent does. `TransportError` if it cannot
        come.
        """


class Transport(Protocol):
    """Ordered messages between ranks."""

    def begin(self) -> None:
        """A part of the schedule begins. Called on every rank before the first send or receive of the part."""

    def ahead(self, edge: Edge) -> int:
        """So many receives of `edge` are to be posted before they are needed."""

    def overlaps(self) -> bool:
        """Whether sums are to begin within the backward that makes what is summed."""

    def send(self, edge: Edge, form: Hashable, message: Sequence[Tensor | None]) -> None:
        """Sends `message` and returns at once. Tensors must not be changed afterwards.

        `form` is what decides the shapes: both ends agree on them at the first message of a form on an edge.
        """

    def post(self, edge: Edge, form: Hashable) -> PendingMessage:
        """Posts the receive of the next message on `edge`, which is of `form`."""

    def agree(self, group: tuple[int, ...], rank: int, forms: Forms) -> None:
        """Says that `rank` will add `forms` with the ranks `group`, and waits until all of them have said the same.

        Raises `TransportError` if they do not. The n-th call of one rank belongs to the n-th call of every other one;
        all come before training, since nobody may be waited for while a backward makes what is added.
        """

    def reduce(self, group: tuple[int, ...], rank: int, form: Hashable, tensor: Tensor) -> PendingMessage:
        """Gives the part of `rank` to a sum over the ranks `group`, which have agreed on its form; the ticket's message
        is the sum. Waits for nobody.

        Parts are added in the order of `group`. The n-th call of one rank belongs to the n-th call of every other one;
        the tensor must not be changed afterwards.
        """

    def check(self) -> None:
        """Raises `TransportError` if it has been broken off. Waits for nothing."""

    def flush(self) -> None:
        """Waits until every message has been handed to the network."""

    def close(self) -> None:
        """Ends the transport; messages that were sent are delivered first."""


class _Sent(NamedTuple):
    """A message that has been sent."""

    message: Message
    staged: Staged
    """Its tensors, in their order."""


@dataclass(slots=True)
class _LoopbackTicket:
    """The `number`-th message of an edge."""

    arrived: dict[int, _Sent]
    number: int
    staging: Staging

    def ready(self) -> bool:
        return self.number in self.arrived

    def wait(self) -> Message:
        message, staged = self.arrived.pop(self.number)
        self.staging.follow(staged)
        return message


@dataclass(slots=True)
class _Sum:
    """A sum over `group`, and the parts that are there."""

    group: tuple[int, ...]
    staging: Staging
    parts: dict[int, Staged] = field(default_factory=dict)
    total: Staged | None = None

    def ready(self) -> bool:
        return len(self.parts) == len(self.group)

    def wait(self) -> Message:
        if self.total is None:
            parts = [self.staging.follow(self.parts[rank])[0] for rank in self.group]
            self.total = self.staging.stay((reduce(torch.add, parts),))
        # As from another process: each rank may change what it got.
        return (self.staging.follow(self.total)[0].clone(),)


@dataclass(slots=True)
class _Queue:
    arrived: dict[int, _Sent] = field(default_factory=dict)
    sent: int = 0
    posted: int = 0


class LoopbackTransport:
    """All ranks in this process; what one of them computes goes to the others by `staging`."""

    def __init__(self, staging: Staging | None = None) -> None:
        self._staging = staging or HostStaging()
        self._queues: defaultdict[Edge, _Queue] = defaultdict(_Queue)
        self._sums: defaultdict[tuple[int, ...], deque[_Sum]] = defaultdict(deque)
        """By group: the sums that some rank has given no part to yet."""

    def begin(self) -> None:
        """Nothing changes."""

    def ahead(self, edge: Edge) -> int:
        return 1

    def overlaps(self) -> bool:
        return True

    def send(self, edge: Edge, form: Hashable, message: Sequence[Tensor | None]) -> None:
        queue = self._queues[edge]
        sent = tuple(
            None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad) for tensor in message
        )
        staged = self._staging.stay([tensor for tensor in sent if tensor is not None])
        queue.arrived[queue.sent] = _Sent(sent, staged)
        queue.sent += 1

    def post(self, edge: Edge, form: Hashable) -> PendingMessage:
        queue = self._queues[edge]
        queue.posted += 1
        return _LoopbackTicket(queue.arrived, queue.posted - 1, self._staging)

    def agree(self, group: tuple[int, ...], rank: int, forms: Forms) -> None:
        """The ranks of one process have one model."""

    def reduce(self, group: tuple[int, ...], rank: int, form: Hashable, tensor: Tensor) -> PendingMessage:
        sums = self._sums[group]
        current = next((entry for entry in sums if rank not in entry.parts), None)
        if current is None:
            current = _Sum(group, self._staging)
            sums.append(current)
        current.parts[rank] = self._staging.stay((tensor.detach(),))
        while sums and sums[0].ready():
            sums.popleft()
        return current

    def check(self) -> None:
        """Nothing can break."""

    def flush(self) -> None:
        """A message has arrived when it is sent."""

    def close(self) -> None:
        self._queues.clear()
        self._sums.clear()
