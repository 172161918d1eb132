"""A device that executes work at once, and detects whether one that executes it later might have computed other values.

Every PyTorch operation of the test's thread, including those of autograd and optimizers, passes a dispatch mode. It
records the stream in which the operation would run and the memory that it reads and writes. Vector clocks order the
streams: an event carries the clock of the stream that it was recorded in to the streams that wait for it. Two accesses
of the same memory, at least one of them a write, are a race if neither is known to come before the other. So is memory
that is allocated again, on the stream that it was made on, while another stream might still use it. The simulated
allocator reuses all freed memory at the next request, unless `record_stream` has kept it for the other stream.
"""

import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.runtime.devices.accelerators import ACCELERATORS, Layout
from penstock.runtime.devices.communicators import Communicator, Members
from support.simulated.tardy_backend import connect, failure_of

MANY = 100
"""More streams than any test has."""
EMPTY = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}
"""Operations that allocate memory and do not write it."""
LIKE = {
    torch.ops.aten.full_like,
    torch.ops.aten.new_full,
    torch.ops.aten.new_ones,
    torch.ops.aten.new_zeros,
    torch.ops.aten.ones_like,
    torch.ops.aten.zeros_like,
}
"""Operations that read a tensor's shape and dtype, but not its values."""
Clock = dict[int, int]
"""For every stream, the number of its operations that are known to come before."""


class RacingStream:
    """Operations in a sequence."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.knows: Clock = defaultdict(int)

    def step(self) -> int:
        """Returns the number of its next operation."""
        self.knows[self.number] += 1
        return self.knows[self.number]

    def merge(self, clock: Clock) -> None:
        """Orders its later operations after all that are in `clock`."""
        for stream, count in clock.items():
            self.knows[stream] = max(self.knows[stream], count)


@dataclass(eq=False)
class RacingEvent:
    """A position in a stream."""

    device: "RacingDevice"
    clock: Clock
    at: float = field(default_factory=time.perf_counter)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        # All work that the host enqueues from now on comes after the event.
        for stream in self.device.streams:
            stream.merge(self.clock)


@dataclass(eq=False)
class _Memory:
    """One storage, with the numbers of the last accesses by each stream."""

    alive: StorageWeakRef
    made_on: RacingStream
    writes: dict[int, int] = field(default_factory=dict)
    reads: dict[int, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)


class RacingDevice:
    """An `Accelerator` whose memory is the host's. It collects the errors that it finds in `races`. `tardy`: whether it
    can send by itself, as a GPU does with NCCL.
    """

    def __init__(self, tardy: bool = False) -> None:
        self.name, self.visible, self.backend = uuid.uuid4().hex, 1, "tardy" if tardy else ""
        self.streams = [RacingStream(0)]
        self.races: list[str] = []
        self._local = threading.local()
        """The current stream of each thread, if it is not the first one."""
        self._memories: dict[int, _Memory] = {}
        self._made_on: defaultdict[int, list[tuple[int, _Memory]]] = defaultdict(list)
        """By stream: the memories that live, or did when the stream last allocated."""
        """By the stream that it was made on."""
        self._doing = "?"

    def communicator(self, members: Members, ctas: int) -> Communicator:
        return connect(members)

    def failure(self, communicator: Communicator) -> str:
        return failure_of(communicator)

    def enter_thread(self) -> None:
        """Does nothing: every thread can use the device."""

    def stream(self) -> RacingStream:
        self.streams.append(RacingStream(len(self.streams)))
        return self.streams[-1]

    def current(self) -> RacingStream:
        return getattr(self._local, "stream", self.streams[0])

    @contextmanager
    def on(self, stream: RacingStream) -> Iterator[None]:
        before, self._local.stream = self.current(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def record_event(self, stream: RacingStream) -> RacingEvent:
        stream.step()
        return RacingEvent(self, dict(stream.knows))

    def record_timed_event(self) -> RacingEvent:
        return self.record_event(self.current())

    def seconds(self, start: RacingEvent, stop: RacingEvent) -> float:
        return stop.at - start.at

    def wait(self, stream: RacingStream, event: RacingEvent) -> None:
        stream.merge(event.clock)

    def host_memory(self, layout: Layout) -> Tensor:
        memory = self.device_memory(layout, self.current())
        # The allocator of pinned memory takes copies into account.
        self._memory(memory).kept.update(range(MANY))
        return memory

    def device_memory(self, layout: Layout, stream: RacingStream) -> Tensor:
        shape, strides, dtype = layout
        with self.on(stream):
            return torch.empty_strided(shape, strides, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor, stream: RacingStream) -> None:
        with self.on(stream), torch.no_grad():
            target.copy_(source)

    def record_stream(self, tensor: Tensor, stream: RacingStream) -> None:
        self._memory(tensor).kept.add(stream.number)

    def make(self, tensors: list[Tensor]) -> None:
        """Allocates memory for `tensors` on the current stream."""
        for tensor in tensors:
            self._memory(tensor)

    def access(self, doing: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Checks and records accesses by the current stream."""
        self._doing, stream = doing, self.current()
        number = stream.step()
        for tensor in reads:
            memory = self._memory(tensor)
            self._check("reads what", stream, memory.writes)
            memory.reads[stream.number] = number
        for tensor in writes:
            memory = self._memory(tensor)
            self._check("writes what", stream, memory.writes)
            self._check("overwrites what", stream, memory.reads)
            memory.writes[stream.number] = number

    def finish(self) -> list[str]:
        """Returns all races."""
        return self.races

    def _memory(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        found = self._memories.get(storage._cdata)
        if found is None:
            self._lend(self.current())
            found = self._memories[storage._cdata] = _Memory(StorageWeakRef(storage), self.current())
            self._made_on[found.made_on.number].append((storage._cdata, found))
        return found

    def _check(self, verb: str, stream: RacingStream, accesses: dict[int, int]) -> None:
        for other, number in accesses.items():
            if stream.knows[other] < number and other != stream.number:
                self.races.append(f"{self._doing} on stream {stream.number} {verb} stream {other} may not have done")

    def _lend(self, stream: RacingStream) -> None:
        """Allocates memory on `stream`, which may be any that was freed."""
        expired, alive, freed = torch.UntypedStorage._expired, [], []
        for key, memory in self._made_on[stream.number]:
            (freed if expired(memory.alive.cdata) else alive).append((key, memory))
        self._made_on[stream.number] = alive
        for key, memory in freed:
            del self._memories[key]
            for accesses in (memory.reads, memory.writes):
                unknown = {other: number for other, number in accesses.items() if other not in memory.kept}
                self._check("has memory that", stream, unknown)


class Watching(TorchDispatchMode):
    """Reports all operations of this thread to `device`."""

    def __init__(self, device: RacingDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        names, written = _arguments_of(func)
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        reads = [tensor for name, value in given.items() if name not in written for tensor in _tensors(value)]
        writes = [tensor for name in written for tensor in _tensors(given.get(name))]
        before = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        result = func(*args, **(kwargs or {}))
        made = [tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in before]
        is_view = not made and not writes and bool(_tensors(result))
        if func.overloadpacket in EMPTY:
            self.device.make(made)
        elif not is_view:
            # An operation that reads and writes the same memory, such as an in-place addition, is recorded as a write.
            self.device.access(str(func), [] if func.overloadpacket in LIKE else reads, [*writes, *made])
        return result


@cache
def _arguments_of(func: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    """The names of all arguments, and of those that are written."""
    arguments = func._schema.arguments
    written = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return tuple(a.name for a in arguments), frozenset(written)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if tree is None or isinstance(tree, bool | int | float):
        return []
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def on_streams(device: RacingDevice) -> Iterator[None]:
    """Makes `device` the accelerator of PyTorch's CPU for the duration of a block."""
    ACCELERATORS["cpu"] = lambda _: device  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        del ACCELERATORS["cpu"]
