"""What the runtime asks of an accelerator: streams, events, copies that the host does not wait for, communicators.

A GPU does what it is told later, and in the order of each stream alone. What must come before what is decided where
these calls are made, which is tested on a simulated device; here is only what cannot run without a real one.
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

__all__ = ["ACCELERATORS", "Accelerator", "Cuda", "Event", "Layout", "Stream", "accelerator_of"]

Layout: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Of a tensor: its shape, its strides, which leave no gaps, and its type."""

POOL_STREAMS = 32
"""PyTorch's streams of each priority on a device."""
Stream: TypeAlias = Any
"""A queue of a device: what is in it is done in order, beside what is in the others."""


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether the device has come so far."""

    def synchronize(self) -> None:
        """Waits, on the host, until it has."""


class Accelerator(Protocol):
    """One device, with memory of its own."""

    @property
    def name(self) -> str:
        """What no other device anywhere is called."""

    @property
    def visible(self) -> int:
        """How many devices of its kind this process sees."""

    @property
    def backend(self) -> str:
        """What ``torch.distributed`` calls the library by which such devices send to each other; empty without one."""

    def communicator(self, members: Members, ctas: int) -> Communicator:
        """One by which `members` send to each other, made by them alone, all at the same time. At most `ctas`
        multiprocessors of the device work, or wait, for it at a time.
        """

    def failure(self, communicator: Communicator) -> str:
        """What broke `communicator`, one of this device's; empty while it is whole."""

    def enter_thread(self) -> None:
        """Makes this thread one that uses the device. A thread calls it before it does anything else with it."""

    def stream(self) -> Stream:
        """One that nothing else here uses, as long as there are enough of them."""

    def current(self) -> Stream:
        """The one that this thread computes on."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """In its body this thread computes on `stream`."""

    def record(self, stream: Stream) -> Event:
        """The place after all that is in `stream` now."""

    def mark(self, event: Event | None = None) -> Event:
        """The place after all that is in the current stream now, which also knows when the device came there. `event`
        is a mark that nobody needs any more: it becomes this one.
        """

    def seconds(self, start: Event, stop: Event) -> float:
        """From one mark to another; the device has come to both."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Has all that comes into `stream` from now on be done after `event`. The host goes on."""

    def host_memory(self, layout: Layout) -> Tensor:
        """Memory of the host that the device can copy to and from by itself. It may be dropped as soon as a copy is
        queued.
        """

    def device_memory(self, layout: Layout, stream: Stream) -> Tensor:
        """Memory of the device. Once it is dropped, `stream` may use it for something else."""

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Queues a copy between the device and memory of `host_memory`."""

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """The memory of `tensor`, when it is dropped, is used for something else only after what is in `stream` by
        then.
        """


class Cuda:
    """A GPU, through ``torch.cuda``."""

    _lent: ClassVar[WeakSet[Any]] = WeakSet()
    """Streams that are in use in this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

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
        # A new thread is on the first GPU, where CUDA would make a context as soon as the thread leaves a stream.
        torch.cuda.set_device(self._device)

    def stream(self) -> Stream:
        # PyTorch has so many streams for a device and gives them out in turn, whoever still uses them.
        used = {(stream.device, stream.cuda_stream) for stream in self._lent}
        for _ in range(POOL_STREAMS):
            made = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            if (made.device, made.cuda_stream) not in used:
                break
        else:
            logging.getLogger("penstock").warning(
                "this process uses more than %d streams of %s, which is all that PyTorch has: two of them are one "
                "now, and what is in one may wait for what is in the other. Close pipelines that are done with, or "
                "hold fewer stages in a process",
                POOL_STREAMS,
                self._device,
            )
        self._lent.add(made)
        return made

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def record(self, stream: Stream) -> Event:
        # Who waits for it on the host sleeps, and leaves the core to others.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def mark(self, event: Any = None) -> Event:
        made = torch.cuda.Event(enable_timing=True, blocking=True) if event is None else event  # type: ignore[no-untyped-call]
        made.record(self.current())
        return cast(Event, made)

    def seconds(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop)) / 1e3

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def host_memory(self, layout: Layout) -> Tensor:
        shape, strides, dtype = layout
        # PyTorch gives such memory to nobody else before the copies from and to it are done.
        return torch.empty_strided(shape, strides, dtype=dtype, pin_memory=True)

    def device_memory(self, layout: Layout, stream: Stream) -> Tensor:
        shape, strides, dtype = layout
        with self.on(stream):
            return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        with self.on(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)


ACCELERATORS: dict[str, Callable[[torch.device], Accelerator]] = {"cuda": Cuda}
"""By the type of a device."""


def accelerator_of(device: torch.device) -> Accelerator | None:
    """None for a CPU, which does at once what it is told."""
    make = ACCELERATORS.get(device.type)
    return None if make is None else make(device)
