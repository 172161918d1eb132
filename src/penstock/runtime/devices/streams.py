"""The streams of a process's ranks on their device, and the order between them.

Ranks that share a device compute on one stream each, so that the device works for one rank while another one waits.
Updates run on one more stream, beside computation that still reads older weight versions.

Invariants of this file:
  1. The work of a segment of the schedule (a step or a drain) comes after all work that was in the caller's stream
     before, and all later work in the caller's stream comes after the whole segment. So the user sees the newest
     weights between steps.
  2. An update comes after all work that has read the weights that it may overwrite. All work that reads a version comes
     after the update that made it.
  3. Gradients are kept alive until the stream that they were made on has waited for the update. Recording both streams
     with the allocator would instead return the memory only when the update is done on the device, and the host runs
     ahead of that.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.runtime.devices.accelerators import Accelerator, Event, Stream, accelerator_of


class _HostStreams:
    """Ranks that compute on a CPU. The methods are those of `DeviceStreams`."""

    def within(self, rank: int, work: Callable[[], bool]) -> Callable[[], bool]:
        return work

    def ordered_segment(self) -> AbstractContextManager[None]:
        return nullcontext()

    def order(self, rank: int, sharing: Sequence[int]) -> "UpdateOrder | None":
        return None


class DeviceStreams:
    """Streams of `ranks`, which share the device `accelerator`. A single rank computes on the caller's stream."""

    def __init__(self, accelerator: Accelerator, ranks: Iterable[int]) -> None:
        self._accelerator = accelerator
        several = list(ranks)
        self._own = {rank: accelerator.stream() for rank in several} if len(several) > 1 else {}
        self._updates = accelerator.stream()
        self._orders: list[UpdateOrder] = []

    def on(self, rank: int) -> AbstractContextManager[object]:
        """Returns a context manager in which this thread computes for `rank`."""
        return self._accelerator.on(self._own[rank]) if self._own else nullcontext()

    def within(self, rank: int, work: Callable[[], bool]) -> Callable[[], bool]:
        """Returns what calls `work` while this thread computes for `rank`."""

        def worked() -> bool:
            with self.on(rank):
                return work()

        return worked

    @contextmanager
    def ordered_segment(self) -> Iterator[None]:
        """Returns a context manager that orders a segment of the schedule with the caller's stream."""
        accelerator = self._accelerator
        caller = accelerator.current()
        if self._own:
            begun = accelerator.record_event(caller)
            for stream in self._own.values():
                accelerator.wait(stream, begun)
        try:
            yield
        finally:
            updated = accelerator.record_event(self._updates)
            for stream in self._own.values():
                accelerator.wait(stream, updated)
                accelerator.wait(caller, accelerator.record_event(stream))
            accelerator.wait(caller, updated)
            for order in self._orders:
                order.forget()

    def order(self, rank: int, sharing: Sequence[int]) -> "UpdateOrder | None":
        """Makes the order between the updates of a stage that `rank` holds and the computation that uses it. `sharing`:
        the other ranks of this process that hold some of the same weights. None on a device that executes all work in
        the order of the program.
        """
        streams = [self._own[other] for other in sharing] if self._own else []
        made = UpdateOrder(self._accelerator, self._updates, streams)
        self._orders.append(made)
        return made


class _PendingVersion(NamedTuple):
    """A weight version whose update is in the stream of updates."""

    version: int
    event: Event
    gradients: object
    """The gradients that the update reads. They are kept alive."""


class UpdateOrder:
    """Orders the updates of one stage, which run in the stream `updates`, with the computation of its rank and with
    `sharing`, the streams of other ranks that read the same weights.

    Its methods are called while the stream of the stage's rank is current.
    """

    def __init__(self, accelerator: Accelerator, updates: Stream, sharing: Sequence[Stream]) -> None:
        self._accelerator, self._updates = accelerator, updates
        self._sharing = tuple(sharing)
        self._pending: deque[_PendingVersion] = deque()
        """The versions that this rank's stream has not waited for, oldest first."""

    @contextmanager
    def making(self, version: int, gradients: dict[str, Tensor]) -> Iterator[None]:
        """Returns a context manager in which this thread makes `version` out of `gradients`."""
        accelerator = self._accelerator
        for stream in (accelerator.current(), *self._sharing):
            accelerator.wait(self._updates, accelerator.record_event(stream))
        with accelerator.on(self._updates):
            yield
        self._pending.append(_PendingVersion(version, accelerator.record_event(self._updates), dict(gradients)))

    def read(self, version: int) -> None:
        """Orders work that may read `version`: this rank's later work comes after its update."""
        if self._pending and self._pending[0].version <= version:
            self._follow(version)

    def settle(self) -> None:
        """Releases the gradients of the last update. It is called before this rank makes new ones."""
        if self._pending:
            self._follow(self._pending[-1].version)

    def forget(self) -> None:
        """Drops all pending versions. It is called when the rank's stream has been ordered after all updates."""
        self._pending.clear()

    def _follow(self, version: int) -> None:
        made = [one for one in self._pending if one.version <= version]
        # Another stage that shares some of the weights may update them, perhaps later.
        event = self._accelerator.record_event(self._updates) if self._sharing else made[-1].event
        self._accelerator.wait(self._accelerator.current(), event)
        for _ in made:
            self._pending.popleft()


Streams: TypeAlias = _HostStreams | DeviceStreams
"""The streams of the ranks of one process."""


def streams_for(device: torch.device, ranks: Iterable[int]) -> Streams:
    """Makes the streams of `ranks`, which compute on `device`."""
    accelerator = accelerator_of(device)
    return _HostStreams() if accelerator is None else DeviceStreams(accelerator, ranks)
