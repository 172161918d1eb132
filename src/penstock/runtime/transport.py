"""How tensors get from one rank to another.

The worker speaks to a `Transport` only, and never asks which one it has. Messages on one `Edge` arrive in the order in
which they were sent; that order is the only matching rule (NCCL has no other). A receive is posted before it is needed
and waited for when it is; a send returns at once.

`Loopback` is the transport of one process: all ranks live in it, a message is a Python reference.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch import Tensor

__all__ = ["Edge", "Loopback", "Message", "Ticket", "Transport"]

Message: TypeAlias = tuple[Tensor | None, ...]
"""Tensors in an order that both ends know. None stands for a gradient that nothing depends on."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A directed connection between two ranks. Messages on different lanes do not wait for each other."""

    source: int
    target: int
    lane: str = "stages"

    def __str__(self) -> str:
        return f"rank {self.source} -> rank {self.target} ({self.lane})"


class Ticket(Protocol):
    """A receive that has been posted."""

    def ready(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> Message:
        """The message. A tensor requires a gradient if the one that was sent does. `TransportError` if it cannot
        come.
        """


class Transport(Protocol):
    """Ordered messages between ranks."""

    def send(self, edge: Edge, form: Hashable, message: Sequence[Tensor | None]) -> None:
        """Sends `message` and returns at once. Tensors must not be changed afterwards.

        `form` is what decides the shapes: both ends agree on them at the first message of a form on an edge.
        """

    def post(self, edge: Edge, form: Hashable) -> Ticket:
        """Posts the receive of the next message on `edge`, which is of `form`."""

    def flush(self) -> None:
        """Waits until every message has been handed to the network."""

    def close(self) -> None:
        """Ends the transport; messages that were sent are delivered first."""


@dataclass(slots=True)
class _LoopbackTicket:
    """The `number`-th message of an edge."""

    edge: Edge
    arrived: dict[int, Message]
    number: int

    def ready(self) -> bool:
        return self.number in self.arrived

    def wait(self) -> Message:
        return self.arrived.pop(self.number)


@dataclass(slots=True)
class _Queue:
    arrived: dict[int, Message] = field(default_factory=dict)
    sent: int = 0
    posted: int = 0


class Loopback:
    """All ranks in this process."""

    def __init__(self) -> None:
        self._queues: defaultdict[Edge, _Queue] = defaultdict(_Queue)

    def send(self, edge: Edge, form: Hashable, message: Sequence[Tensor | None]) -> None:
        queue = self._queues[edge]
        queue.arrived[queue.sent] = tuple(
            None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad) for tensor in message
        )
        queue.sent += 1

    def post(self, edge: Edge, form: Hashable) -> Ticket:
        queue = self._queues[edge]
        queue.posted += 1
        return _LoopbackTicket(edge, queue.arrived, queue.posted - 1)

    def flush(self) -> None:
        """A message has arrived when it is sent."""

    def close(self) -> None:
        self._queues.clear()
