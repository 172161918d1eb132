"""A device that executes work later: streams in any order that events allow, and memory that is reused.

It replaces a GPU in tests. Its tensors are CPU tensors that get their values when the device executes the work. Memory
that is no longer referenced is overwritten in the stream that it was allocated on, as soon as a GPU's allocator could
give it to the next tensor. So work that comes too late, or reads too early, finds other numbers.
"""

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from penstock.runtime.devices.accelerators import Layout
from penstock.runtime.devices.communicators import Communicator, Members

POISON = 0xA5


@dataclass(eq=False)
class SimulatedEvent:
    """A position in a stream."""

    device: "SimulatedDevice"
    passed: bool = False
    passed_at: float = 0.0
    records: int = 0
    """How often it was recorded. Only the last time counts."""

    def query(self) -> bool:
        passed = self.passed
        if not passed:
            # The device makes progress while its host polls.
            self.device.advance()
        return passed

    def synchronize(self) -> None:
        while not self.passed:
            self.device.advance()


@dataclass(eq=False)
class SimulatedStream:
    """Operations, each with the event that it waits for, if any."""

    operations: deque[tuple[SimulatedEvent | None, Callable[[], None]]] = field(default_factory=deque)

    def runnable(self) -> bool:
        return bool(self.operations) and (self.operations[0][0] is None or self.operations[0][0].passed)


@dataclass(eq=False)
class _Block:
    """Device memory, which `stream` may reuse when it is not referenced any more and the streams in `kept` are done
    with it.
    """

    buffer: bytearray
    stream: SimulatedStream
    kept: list[SimulatedStream] = field(default_factory=list)


class SimulatedDevice:
    """An `Accelerator`. `seed` determines the order in which its streams progress."""

    name, visible, backend = "simulated", 1, ""

    def __init__(self, seed: int, streams: int = 32) -> None:
        """`streams`: the size of the pool that is handed out round-robin, in addition to the computing stream."""
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._computing = SimulatedStream()
        self._local = threading.local()
        """The current stream of each thread, if it is not the computing one."""
        self._streams = [self._computing]
        self._pool, self._given = streams, 0
        self._blocks: dict[int, _Block] = {}
        """By address."""

    def stream(self) -> SimulatedStream:
        with self._lock:
            number = 1 + self._given % self._pool
            self._given += 1
            if number == len(self._streams):
                self._streams.append(SimulatedStream())
            return self._streams[number]

    def communicator(self, members: Members, ctas: int) -> Communicator:
        raise AssertionError("tests connect the ranks of a simulated device")

    def failure(self, communicator: Communicator) -> str:
        return ""

    def enter_thread(self) -> None:
        """Does nothing: every thread can use the device."""

    def current(self) -> SimulatedStream:
        return getattr(self._local, "stream", self._computing)

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._local.stream = self.current(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def record_timed_event(self) -> SimulatedEvent:
        return self.record_event(self.current())

    def seconds(self, start: SimulatedEvent, stop: SimulatedEvent) -> float:
        return stop.passed_at - start.passed_at

    def record_event(self, stream: SimulatedStream) -> SimulatedEvent:
        event = SimulatedEvent(self)
        self.pass_by(stream, event)
        return event

    def pass_by(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        """Queues that `event` passes."""
        event.passed, event.records = False, event.records + 1
        number = event.records

        def run() -> None:
            if event.records == number:
                event.passed, event.passed_at = True, time.perf_counter()

        self.do(stream, run)

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        self.do(stream, lambda: None, event)

    def host_memory(self, layout: Layout) -> Tensor:
        shape, strides, dtype = layout
        return torch.empty_strided(shape, strides, dtype=dtype)

    def device_memory(self, layout: Layout, stream: SimulatedStream) -> Tensor:
        shape, strides, dtype = layout
        size = torch.empty_strided(shape, strides, dtype=dtype, device="meta").untyped_storage().nbytes()
        block = _Block(bytearray([POISON]) * size, stream)
        array = np.frombuffer(block.buffer, dtype=np.uint8)
        weakref.finalize(array, self._drop, block)
        tensor = torch.from_numpy(array).view(dtype).as_strided(shape, strides)
        with self._lock:
            self._blocks[tensor.data_ptr()] = block
        return tensor

    def copy(self, target: Tensor, source: Tensor, stream: SimulatedStream) -> None:
        given, taken = self.memory(target), self.memory(source)

        def run() -> None:
            given[:] = taken  # type: ignore[assignment]

        self.do(stream, run)

    def record_stream(self, tensor: Tensor, stream: SimulatedStream) -> None:
        if tensor.nbytes:
            self._block(tensor).kept.append(stream)

    def fill(self, tensor: Tensor, value: float) -> None:
        """Queues, in the current stream, that every element of `tensor` becomes `value`."""
        given, numbers = self.memory(tensor), np.full(tensor.numel(), value, np.float64).view(np.uint8)

        def run() -> None:
            given[:] = numbers  # type: ignore[call-overload]

        self.do(self.current(), run)

    def read(self, tensor: Tensor) -> list[float]:
        """Queues a read of `tensor` in the current stream; its elements will be in the list."""
        taken, found = self.memory(tensor), list[float]()
        self.do(self.current(), lambda: found.extend(np.array(taken).view(np.float64).tolist()))
        return found

    def advance(self) -> None:
        """Executes one operation of some stream; sleeps briefly if none can be executed."""
        with self._lock:
            ready = [stream for stream in self._streams if stream.runnable()]
            if ready:
                _, run = self._random.choice(ready).operations.popleft()
                run()
                return
        time.sleep(1e-4)

    def finish(self) -> None:
        while any(stream.operations for stream in self._streams):
            self.advance()

    def settle(self, streams: Iterable[SimulatedStream], seconds: float) -> bool:
        """Executes operations until `streams` have done all that they hold now. Returns False if that takes longer than
        `seconds`. A host may have to wait like this when it needs a kernel for the first time.
        """
        events = [self.record_event(stream) for stream in streams]
        deadline = time.monotonic() + seconds
        while not all(event.passed for event in events):
            if time.monotonic() > deadline:
                return False
            self.advance()
        return True

    def is_stuck(self) -> bool:
        """Executes all that can be executed. Returns whether something is left that waits forever."""
        while any(stream.runnable() for stream in self._streams):
            self.advance()
        return any(stream.operations for stream in self._streams)

    def do(self, stream: SimulatedStream, run: Callable[[], None], after: SimulatedEvent | None = None) -> None:
        """Queues `run` in `stream`, to wait for the event `after`."""
        with self._lock:
            stream.operations.append((after, run))

    def _drop(self, block: _Block) -> None:
        """Queues that `block`, which is not referenced any more, is overwritten."""
        for stream in dict.fromkeys(block.kept):
            self.wait(block.stream, self.record_event(stream))

        def overwrite() -> None:
            block.buffer[:] = bytes([POISON]) * len(block.buffer)

        self.do(block.stream, overwrite)

    def _block(self, tensor: Tensor) -> _Block:
        return self._blocks[tensor.untyped_storage().data_ptr()]

    def memory(self, tensor: Tensor) -> memoryview | np.ndarray:
        """The memory of `tensor`; device memory is not kept alive by it."""
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        if block is None:
            # Host memory is kept until the copy is done.
            return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8).numpy()
        start = tensor.storage_offset() * tensor.element_size()
        return memoryview(block.buffer)[start : start + tensor.nbytes]


class Hasty(SimulatedDevice):
    """Does not wait for events: a planted fault."""

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        pass


class Forgetful(SimulatedDevice):
    """Ignores which streams memory must be kept for: another one."""

    def record_stream(self, tensor: Tensor, stream: SimulatedStream) -> None:
        pass
