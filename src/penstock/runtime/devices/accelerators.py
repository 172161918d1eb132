"""The interface to an accelerator: streams, events, communicators, and copies that do not block the host.

A GPU executes work after the host has queued it, and only in the order of each stream. This file holds what needs a
real GPU. The order between streams is decided by the callers, which are tested on a simulated device.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, TypeAlias, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.devices.communicators import Communicator, Members, connect_nccl, nccl_failure

Layout: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""The shape, the strides (which leave no gaps) and the dtype of a tensor."""

_POOL_STREAMS = 32
"""The number of streams of each priority in PyTorch's pool for one device."""
Stream: TypeAlias = Any
"""A queue of work on a device. A device executes each stream in order, and different streams concurrently."""


class Event(Protocol):
    """A position in a stream."""

    def query(self) -> bool:
        """Whether the device has reached this position."""

    def synchronize(self) -> None:
        """Blocks the host until the device has reached this position."""


class Accelerator(Protocol):
    """One device with memory of its own."""

    @property
    def name(self) -> str:
        """A globally unique identifier of the device, such as the UUID of a GPU."""

    @property
    def visible(self) -> int:
        """The number of devices of this kind that the process sees."""

    @property
    def backend(self) -> str:
        """The ``torch.distributed`` backend for messages between such devices; empty if there is none."""

    def communicator(self, members: Members, ctas: int) -> Communicator:
        """Makes a communicator between `members`. Collective: all members call it at the same time, and no other
        process has to. The communicator occupies at most `ctas` multiprocessors of the device at a time.
        """

    def failure(self, communicator: Communicator) -> str:
        """Describes what broke `communicator`, one of this device's; empty while it works."""

    def enter_thread(self) -> None:
        """Makes the device usable from this thread. A thread calls it before anything else here."""

    def stream(self) -> Stream:
        """Returns a stream that nothing else here uses, as long as the device has enough of them."""

    def current(self) -> Stream:
        """Returns the stream that is current in this thread."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Returns a context manager that makes `stream` the current stream of this thread."""

    def record_event(self, stream: Stream) -> Event:
        """Records an event behind all work that is now in `stream`."""

    def record_timed_event(self) -> Event:
        """Records an event with a timestamp in the current stream."""

    def seconds(self, start: Event, stop: Event) -> float:
        """The seconds between two timed events that the device has reached."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Makes all work that is queued in `stream` from now on wait for `event`. Does not block the host."""

    def host_memory(self, layout: Layout) -> Tensor:
        """Allocates pinned host memory, for copies that run beside the host. It may be dropped as soon as a copy is
        queued.
        """

    def device_memory(self, layout: Layout, stream: Stream) -> Tensor:
        """Allocates memory of the device. After it is dropped, later work in `stream` may reuse it."""

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Queues a copy between the device and memory from `host_memory`."""

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Keeps the memory of `tensor`, after it is dropped, from being reused before the work that is then in `stream`
        is done.
        """


class _Cuda:
    """An NVIDIA GPU, through ``torch.cuda``."""

    _all: ClassVar[WeakSet["_Cuda"]] = WeakSet()
    """Those of this process, whose streams are in use. The streams themselves are not kept in a `WeakSet`: PyTorch 2.11
    frees a ``torch.cuda.Stream`` without clearing weak references to it, so that they point to other objects later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lent = device, list[Any]()
        self._all.add(self)

    @property
    def name(self) -> str:
        return str(torch.cuda.get_device_properties(self._device).uuid)

    @property
    def visible(self) -> int:
        return torch.cuda.device_count()

    @property
    def backend(self) -> str:
        return "nccl" if dist.is_nccl_available() else ""

    def communicator(self, members: Members, ctas: int) -> Communicator:
        return connect_nccl(members, ctas, self._device)

    def failure(self, communicator: Communicator) -> str:
        return nccl_failure(communicator)

    def enter_thread(self) -> None:
        # In a new thread the first GPU is current. CUDA would create a context on it as soon as the thread leaves a
        # stream.
        torch.cuda.set_device(self._device)

    def stream(self) -> Stream:
        # PyTorch hands out the streams of a fixed pool round-robin, and does not look whether one is still in use.
        used = {(stream.device, stream.cuda_stream) for one in self._all for stream in one._lent}
        for _ in range(_POOL_STREAMS):
            made = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            if (made.device, made.cuda_stream) not in used:
                break
        else:
            logging.getLogger("penstock").warning(
                "this process uses more than the %d streams of %s that PyTorch has: two of its streams are now the "
                "same one, so that work in one may wait for work in the other. Close pipelines that are no longer "
                "used, or place fewer stages in one process",
                _POOL_STREAMS,
                self._device,
            )
        self._lent.append(made)
        return made

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def record_event(self, stream: Stream) -> Event:
        # With `blocking`, a host thread that waits for the event sleeps instead of spinning on its core.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def record_timed_event(self) -> Event:
        made = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        made.record(self.current())
        return cast(Event, made)

    def seconds(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop)) / 1e3

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def host_memory(self, layout: Layout) -> Tensor:
        shape, strides, dtype = layout
        # PyTorch reuses pinned memory only after the copies from and to it are done.
        return torch.empty_strided(shape, strides, dtype=dtype, pin_memory=True)

    def device_memory(self, layout: Layout, stream: Stream) -> Tensor:
        shape, strides, dtype = layout
        with self.on(stream):
            return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        with self.on(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        # A buffer of the user's layers may be on the CPU, where copies are made at once.
        if tensor.is_cuda:
            tensor.record_stream(stream)


ACCELERATORS: dict[str, Callable[[torch.device], Accelerator]] = {"cuda": _Cuda}
"""Constructors of accelerators, by device type."""


def accelerator_of(device: torch.device) -> Accelerator | None:
    """The accelerator of `device`; None for a CPU, which executes work as soon as it is called."""
    make = ACCELERATORS.get(device.type)
    return None if make is None else make(device)
