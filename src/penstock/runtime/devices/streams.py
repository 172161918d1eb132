"""The streams of a process's ranks on their device, and how these streams meet.

Ranks that share a device compute on a stream each, so that it does the work of one while another one waits. Versions of
weights are made on one more stream, beside what still computes with older versions.

Laws of this file:
  1. What a part of the schedule does comes after all that the caller's stream had in it before, and all that comes into
     the caller's stream after the part comes after the whole of it: between steps the user sees the newest weights.
  2. An update comes after all that has read the weights that it may overwrite, and whatever reads a version comes after
     the update that made it.
  3. Gradients are kept until the stream that they were made on has waited for the update. An allocator that is told of
     both streams instead gives their memory away only when the update is done, and the host is ahead of that.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.runtime.devices.accelerators import Accelerator, Event, Stream, accelerator_of

__all__ = ["DeviceStreams", "HostStreams", "Streams", "UpdateOrder", "streams_for"]


class Streams(Protocol):
    """Those of the ranks of a process."""

    def on(self, rank: int) -> AbstractContextManager[object]:
        """In its body this thread computes for `rank`."""

    def part(self) -> AbstractContextManager[None]:
        """Around a part of the schedule."""

    def order(self, rank: int, sharing: Sequence[int]) -> "UpdateOrder | None":
        """Between the updates of a stage that `rank` holds and what computes with it; `sharing` are the other ranks of
        this process that hold some of the same weights. None where everything is done in the order of the program.
        """


class HostStreams:
    """For ranks that compute on a CPU."""

    def on(self, rank: int) -> AbstractContextManager[object]:
        return nullcontext()

    def part(self) -> AbstractContextManager[None]:
        return nullcontext()

    def order(self, rank: int, sharing: Sequence[int]) -> "UpdateOrder | None":
        return None


class DeviceStreams:
    """For `ranks` that share the device `accelerator`. One alone computes on the caller's stream."""

    def __init__(self, accelerator: Accelerator, ranks: Iterable[int]) -> None:
        self._accelerator = accelerator
        several = list(ranks)
        self._own = {rank: accelerator.stream() for rank in several} if len(several) > 1 else {}
        self._updates = accelerator.stream()
        self._orders: list[UpdateOrder] = []

    def on(self, rank: int) -> AbstractContextManager[object]:
        return self._accelerator.on(self._own[rank]) if self._own else nullcontext()

    @contextmanager
    def part(self) -> Iterator[None]:
        accelerator = self._accelerator
        caller = accelerator.current()
        if self._own:
            begun = accelerator.record(caller)
            for stream in self._own.values():
                accelerator.wait(stream, begun)
        try:
            yield
        finally:
            updated = accelerator.record(self._updates)
            for stream in self._own.values():
                accelerator.wait(stream, updated)
                accelerator.wait(caller, accelerator.record(stream))
            accelerator.wait(caller, updated)
            for order in self._orders:
                order.forget()

    def order(self, rank: int, sharing: Sequence[int]) -> "UpdateOrder | None":
        made = UpdateOrder(self._accelerator, self._updates, [self._own[other] for other in sharing])
        self._orders.append(made)
        return made


class _Made(NamedTuple):
    """A version that is being made."""

    version: int
    event: Event
    gradients: object
    """What it is made of."""


class UpdateOrder:
    """Of a stage whose weights `sharing`, streams of other ranks, read as well, and `updates` writes.

    Its methods are called where the stage's rank computes.
    """

    def __init__(self, accelerator: Accelerator, updates: Stream, sharing: Sequence[Stream]) -> None:
        self._accelerator, self._updates = accelerator, updates
        self._sharing = tuple(sharing)
        self._made: deque[_Made] = deque()
        """Versions that this rank's stream has not waited for, oldest first."""

    @contextmanager
    def making(self, version: int, gradients: dict[str, Tensor]) -> Iterator[None]:
        """In its body this thread makes `version` out of `gradients`."""
        accelerator = self._accelerator
        for stream in (accelerator.current(), *self._sharing):
            accelerator.wait(self._updates, accelerator.record(stream))
        with accelerator.on(self._updates):
            yield
        self._made.append(_Made(version, accelerator.record(self._updates), dict(gradients)))

    def read(self, version: int) -> None:
        """What this rank computes from now on may read `version`."""
        if self._made and self._made[0].version <= version:
            self._follow(version)

    def settle(self) -> None:
        """This rank is about to make gradients: those of the last update are let go of first."""
        if self._made:
            self._follow(self._made[-1].version)

    def forget(self) -> None:
        """This rank's stream goes on after all that has been done."""
        self._made.clear()

    def _follow(self, version: int) -> None:
        made = [one for one in self._made if one.version <= version]
        # Some of the weights may be updated with another stage that shares them, perhaps later.
        event = self._accelerator.record(self._updates) if self._sharing else made[-1].event
        self._accelerator.wait(self._accelerator.current(), event)
        for _ in made:
            self._made.popleft()


def streams_for(device: torch.device, ranks: Iterable[int]) -> Streams:
    """For `ranks`, which compute on `device`."""
    accelerator = accelerator_of(device)
    return HostStreams() if accelerator is None else DeviceStreams(accelerator, ranks)
