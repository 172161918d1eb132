"""Copies tensors of an accelerator to and from host memory, beside the computation and in the right order.

Gloo sends from and receives into host memory, so a message is copied to the host before it is sent and to the device
after it has arrived. The copies run on two streams of their own, one for each direction, so that they block neither the
computation on the device nor the computing thread. Each user of this file shares one such pair of streams, since a GPU
has few.

Invariants of this file:
  1. A copy comes after all work that was in the computing stream when the tensor was handed over. Work of the computing
     stream on a tensor comes after the copy that brought it.
  2. Memory that two streams use is not reused before both are done with it.
  3. Only `Event.synchronize` blocks the host, and only threads beside the computing one call it.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.runtime.devices.accelerators import Accelerator, Event, Layout, Stream, accelerator_of

Staged: TypeAlias = tuple[Sequence[Tensor], Event]
"""Tensors, and the event after which they hold their values."""
Memory: TypeAlias = Callable[[Layout], Tensor]
"""Returns host memory of a layout."""


class _CompletedEvent:
    """An event that is already over."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Returns at once."""


_COMPLETED = _CompletedEvent()


def on_host(tensors: Sequence[Tensor]) -> Staged:
    """Returns `tensors`, which are on the host and ready."""
    return tensors, _COMPLETED


NOTHING_STAGED = on_host(())


class HostStaging:
    """Passes tensors through that are on the host anyway. Its methods are those of `DeviceStaging`."""

    separate_memory = False

    def enter_thread(self) -> None:
        """Does nothing: every thread can use the host."""

    def host_memory(self, layout: Layout) -> Tensor:
        shape, strides, dtype = layout
        return torch.empty_strided(shape, strides, dtype=dtype)

    def to_host(self, tensors: Sequence[Tensor], memory: Memory | None = None, *, kept: bool = False) -> Staged:
        """With `memory` it copies."""
        return on_host(tensors if memory is None else [memory(layout_of(each)).copy_(each) for each in tensors])

    def back_to_device(self, tensors: Sequence[Tensor]) -> Staged:
        return on_host([each.clone() for each in tensors])

    def to_device(self, tensors: Sequence[Tensor]) -> Staged:
        return on_host(tensors)

    def in_place(self, tensors: Sequence[Tensor]) -> Staged:
        return on_host(tensors)

    def wait_for(self, staged: Staged) -> Sequence[Tensor]:
        return staged[0]

    def follow(self, staged: Staged) -> None:
        """Does nothing: the tensors are the originals."""


class _CheckedEvent:
    """An event that also passes if the work before it was aborted. `check` raises the reason in that case."""

    def __init__(self, event: Event, check: Callable[[], None]) -> None:
        self.query, self.event, self._check = event.query, event, check

    def synchronize(self) -> None:
        self.event.synchronize()
        self._check()


class DeviceStaging:
    """Stages the tensors of `accelerator`, on one stream for copies to the host and one for copies to the device.

    `check` raises if the work of the device was aborted: the copies on the host are then worthless.
    """

    separate_memory = True
    """Whether the device has memory of its own."""

    def __init__(self, accelerator: Accelerator, check: Callable[[], None] = lambda: None) -> None:
        self._accelerator, self._check = accelerator, check

    @cached_property
    def _to_host_stream(self) -> Stream:
        return self._accelerator.stream()

    @cached_property
    def _to_device_stream(self) -> Stream:
        return self._accelerator.stream()

    def enter_thread(self) -> None:
        """Makes this object usable from this thread. A thread calls it before anything else here."""
        self._accelerator.enter_thread()

    def host_memory(self, layout: Layout) -> Tensor:
        """Allocates host memory to receive in."""
        return self._accelerator.host_memory(layout)

    def to_host(self, tensors: Sequence[Tensor], memory: Memory | None = None, *, kept: bool = False) -> Staged:
        """Starts to copy `tensors` to the host, into what `memory` returns for them. Called on the computing thread.

        `kept`: the caller keeps them until it has called `follow`. The computing stream can then reuse their memory
        at once; else only when the device has done the copy, and the host runs ahead of that.
        """
        accelerator, stream = self._accelerator, self._to_host_stream
        accelerator.wait(stream, accelerator.record_event(accelerator.current()))
        copies = []
        for tensor in tensors:
            copy = (memory or accelerator.host_memory)(layout_of(tensor))
            accelerator.copy(copy, tensor.detach(), stream)
            # The tensor belongs to the computing stream, whose allocator would reuse the memory as soon as the tensor
            # is dropped.
            if not kept:
                accelerator.record_stream(tensor, stream)
            copies.append(copy)
        return copies, _CheckedEvent(accelerator.record_event(stream), self._check)

    def back_to_device(self, tensors: Sequence[Tensor]) -> Staged:
        """Starts to copy `tensors` as `to_device` does, into memory of the computing stream, after all work that is in
        it. Called on the computing thread, which keeps both ends until it has called `follow`.
        """
        accelerator, stream = self._accelerator, self._to_device_stream
        current = accelerator.current()
        copies = [accelerator.device_memory(layout_of(tensor), current) for tensor in tensors]
        accelerator.wait(stream, accelerator.record_event(current))
        for copy, tensor in zip(copies, tensors, strict=True):
            accelerator.copy(copy, tensor, stream)
        return copies, _CheckedEvent(accelerator.record_event(stream), self._check)

    def to_device(self, tensors: Sequence[Tensor]) -> Staged:
        """Starts to copy `tensors`, which are in `host_memory`, to the device. Called on any thread."""
        accelerator, stream = self._accelerator, self._to_device_stream
        copies = []
        for tensor in tensors:
            copy = accelerator.device_memory(layout_of(tensor), stream)
            accelerator.copy(copy, tensor, stream)
            copies.append(copy)
        return copies, accelerator.record_event(stream)

    def in_place(self, tensors: Sequence[Tensor]) -> Staged:
        """Returns `tensors` with an event recorded on the current stream, so that another stream can wait for them."""
        return tensors, self._accelerator.record_event(self._accelerator.current())

    def wait_for(self, staged: Staged) -> Sequence[Tensor]:
        """Returns the tensors, and makes the current stream wait until they hold their values."""
        tensors, event = staged
        if not tensors:
            return tensors
        current = self._accelerator.current()
        self._accelerator.wait(current, event)
        for tensor in tensors:
            # The tensor was allocated on another stream.
            self._accelerator.record_stream(tensor, current)
        return tensors

    def follow(self, staged: Staged) -> None:
        """Makes later work of the current stream come after a copy of `to_host` or `back_to_device`. Does not block."""
        event = staged[1]
        if isinstance(event, _CheckedEvent):
            self._accelerator.wait(self._accelerator.current(), event.event)


Staging: TypeAlias = HostStaging | DeviceStaging
"""Moves tensors between a device and the host."""


def staging_for(device: torch.device, check: Callable[[], None] = lambda: None) -> Staging:
    """Makes the staging for tensors on `device`. `check` raises if its work was aborted."""
    accelerator = accelerator_of(device)
    return HostStaging() if accelerator is None else DeviceStaging(accelerator, check)


def layout_of(tensor: Tensor) -> Layout:
    """The layout of `tensor`."""
    return tensor.shape, tensor.stride(), tensor.dtype


def contiguous_layout(tensor: Tensor) -> Layout:
    """The layout of a contiguous copy of `tensor`, which may be expanded or have gaps."""
    return tensor.shape, torch.empty(tensor.shape, device="meta").stride(), tensor.dtype
