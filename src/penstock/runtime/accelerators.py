"""What the runtime asks of an accelerator: streams, events on them, and copies that the host does not wait for.

A GPU does what it is told later, and in the order of each stream alone. What must come before what is decided where
these calls are made, which is tested on a simulated device; here is only what cannot run without a real one.
"""

from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = ["Accelerator", "Cuda", "Event", "Layout", "Stream"]

Layout: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Of a tensor: its shape, its strides, which leave no gaps, and its type."""

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

    def stream(self) -> Stream:
        """A new one."""

    def current(self) -> Stream:
        """The one that this thread computes on."""

    def record(self, stream: Stream) -> Event:
        """The place after all that is in `stream` now."""

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

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def record(self, stream: Stream) -> Event:
        # Who waits for it on the host sleeps, and leaves the core to others.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def host_memory(self, layout: Layout) -> Tensor:
        shape, strides, dtype = layout
        # PyTorch gives such memory to nobody else before the copies from and to it are done.
        return torch.empty_strided(shape, strides, dtype=dtype, pin_memory=True)

    def device_memory(self, layout: Layout, stream: Stream) -> Tensor:
        shape, strides, dtype = layout
        with torch.cuda.stream(stream):
            return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)
