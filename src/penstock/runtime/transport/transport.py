"""The interface by which tensors travel between ranks.

The worker uses a `Transport` and does not depend on which one it is. Messages on one `Edge` arrive in the order in
which they were sent. That order is the only matching rule (NCCL has no other). A receive is posted before its message
is needed, and waited for when it is needed. A send returns at once.

`LoopbackTransport` is the transport of a single process that holds all ranks: a message is a Python reference.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.runtime.devices.staging import HostStaging, Staged, Staging

ALL_RECEIVES = 2**31
"""More receives than any segment of a schedule has."""

Message: TypeAlias = tuple[Tensor | None, ...]
"""Tensors, in an order that both ends agree on. None stands for a gradient that does not exist. What is sent may have
a tensor on the meta device instead, for one that other messages of the same kind have.
"""


class SumKind(NamedTuple):
    """What a rank adds to a sum."""

    numbers: int
    dtype: torch.dtype
    shares: tuple[int, ...] = ()
    """With them a rank receives its share of the sum alone: the numbers of each rank's, in the order of the group."""
    gathers: bool = False
    """Each rank adds its share, and receives the shares of all, one after the other, in place of a sum."""


SumKinds: TypeAlias = Mapping[Hashable, tuple[int, torch.dtype] | SumKind]
"""The kinds of tensors that ranks sum: the number of elements and the dtype of each, and how they are shared out."""


class Channel(StrEnum):
    """Separates messages between the same ranks that must not wait for each other."""

    STAGES = "stages"
    """Activations, gradients and gradient norms."""
    REPORTS = "reports"
    """Losses, metrics and outputs, which are read on the host."""
    BUFFERS = "buffers"
    CALLS = "calls"
    """What ranks tell each other about their calls; on the host at both ends."""
    PROBE = "probe"


class Edge(NamedTuple):
    """A directed connection between two ranks, for the messages of one channel."""

    source: int
    target: int
    channel: Channel = Channel.STAGES

    def __str__(self) -> str:
        return f"rank {self.source} -> rank {self.target} ({self.channel})"


class PendingMessage(Protocol):
    """A receive that has been posted, or a sum that has been started."""

    def ready(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> Message:
        """Returns the message. A tensor requires a gradient if the one that was sent did. `TransportError` if the
        message cannot come.
        """


class Transport(Protocol):
    """Carries ordered messages and sums between ranks."""

    def begin_segment(self) -> None:
        """Begins a segment of the schedule (a step or a drain). Each rank calls it before it sends or receives."""

    def ahead(self, edge: Edge) -> int:
        """The number of receives of `edge` to post before they are needed."""

    def overlaps(self) -> bool:
        """Whether sums should start within the backward that makes their summands."""

    def send(self, edge: Edge, kind: Hashable, message: Sequence[Tensor | None]) -> None:
        """Sends `message` and returns at once. The tensors must not be changed afterwards.

        `kind` determines the shapes. Both ends agree on them at the first message of each kind on an edge.
        """

    def post(self, edge: Edge, kind: Hashable) -> PendingMessage:
        """Posts the receive of the next message on `edge`, which is of `kind`."""

    def agree(self, group: tuple[int, ...], rank: int, kinds: SumKinds) -> None:
        """Agrees with the other ranks of `group` that each will add tensors of `kinds`. Blocks until all ranks have
        called it, and raises `TransportError` if they differ.

        The n-th calls of all ranks belong together. All calls come before training: a backward that makes summands must
        not wait for other ranks.
        """

    def reduce(self, group: tuple[int, ...], rank: int, kind: Hashable, tensor: Tensor) -> PendingMessage:
        """Adds this rank's summand to a sum over the ranks `group`, which have agreed on `kind`. Returns the pending
        sum at once.

        The order of addition is the order of `group`. The n-th calls of all ranks belong together. The tensor must not
        be changed afterwards.
        """

    def check(self) -> None:
        """Raises `TransportError` if the transport has been aborted or a connection is broken. Does not block."""

    def flush(self) -> None:
        """Blocks until every message has been handed to the network."""

    def close(self) -> None:
        """Ends the transport, after delivering the messages that were sent."""


class _LoopbackMessage(NamedTuple):
    """A message that has been sent."""

    message: Message
    staged: Staged | None
    """Its tensors without the Nones, in their order. None on the host, where nothing is waited for."""


@dataclass(slots=True)
class _LoopbackReceive:
    """A receive of the `number`-th message of an edge."""

    arrived: dict[int, _LoopbackMessage]
    number: int
    staging: Staging

    def ready(self) -> bool:
        return self.number in self.arrived

    def wait(self) -> Message:
        message, staged = self.arrived.pop(self.number)
        if staged is not None:
            self.staging.wait_for(staged)
        return message


@dataclass(slots=True)
class _LoopbackSum:
    """A sum over `group`, with the summands so far."""

    group: tuple[int, ...]
    staging: Staging
    summands: dict[int, Staged] = field(default_factory=dict)
    total: Staged | None = None

    def ready(self) -> bool:
        return len(self.summands) == len(self.group)

    def wait(self) -> Message:
        if self.total is None:
            summands = [self.staging.wait_for(self.summands[rank])[0] for rank in self.group]
            self.total = self.staging.in_place((reduce(torch.add, summands),))
        # A copy, as from another process: each rank may change what it received.
        return (self.staging.wait_for(self.total)[0].clone(),)


@dataclass(slots=True)
class _LoopbackQueue:
    arrived: dict[int, _LoopbackMessage] = field(default_factory=dict)
    sent: int = 0
    posted: int = 0


class LoopbackTransport:
    """Holds all ranks in this process. `staging` orders the streams of the ranks."""

    def __init__(self, staging: Staging | None = None) -> None:
        self._staging = staging or HostStaging()
        self._queues: defaultdict[Edge, _LoopbackQueue] = defaultdict(_LoopbackQueue)
        self._sums: defaultdict[tuple[int, ...], deque[_LoopbackSum]] = defaultdict(deque)
        """By group: the sums that still lack a summand."""

    def begin_segment(self) -> None:
        """Does nothing."""

    def ahead(self, edge: Edge) -> int:
        return 1

    def overlaps(self) -> bool:
        return True

    def send(self, edge: Edge, kind: Hashable, message: Sequence[Tensor | None]) -> None:
        queue = self._queues[edge]
        made = [
            tensor if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad) for tensor in message
        ]
        staged = None
        if self._staging.separate_memory:
            staged = self._staging.in_place([tensor for tensor in made if tensor is not None and not tensor.is_meta])
        queue.arrived[queue.sent] = _LoopbackMessage(tuple(made), staged)
        queue.sent += 1

    def post(self, edge: Edge, kind: Hashable) -> PendingMessage:
        queue = self._queues[edge]
        queue.posted += 1
        return _LoopbackReceive(queue.arrived, queue.posted - 1, self._staging)

    def agree(self, group: tuple[int, ...], rank: int, kinds: SumKinds) -> None:
        """Does nothing: the ranks of one process have one model, and share nothing out."""

    def reduce(self, group: tuple[int, ...], rank: int, kind: Hashable, tensor: Tensor) -> PendingMessage:
        sums = self._sums[group]
        current = next((entry for entry in sums if rank not in entry.summands), None)
        if current is None:
            current = _LoopbackSum(group, self._staging)
            sums.append(current)
        current.summands[rank] = self._staging.in_place((tensor.detach(),))
        while sums and sums[0].ready():
            sums.popleft()
        return current

    def check(self) -> None:
        """Does nothing: there is no connection that can break."""

    def flush(self) -> None:
        """Does nothing: a message has arrived as soon as it is sent."""

    def close(self) -> None:
        self._queues.clear()
        self._sums.clear()
