"""Tensors of an accelerator on their way through host memory: copied beside the computation, in the right order.

A message that Gloo carries is copied to host memory when it is sent and to the device when it has come. The copies are
on streams of their own, one for each direction, so that neither the device's computation nor the computing thread waits
for them. There is no more than one such pair in a process for each thing that needs one: a GPU has few streams.

Laws of this file:
  1. A copy comes after what the computing stream had in it when the tensor was handed over, and what the computing
     stream does with a tensor comes after the copy that brought it.
  2. Memory that two streams use is given away by neither before the other one is done with it.
  3. Only `Event.synchronize` waits on the host, and only threads beside the computing one call it.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.runtime.devices.accelerators import Accelerator, Event, Layout, Stream, accelerator_of

__all__ = ["NOTHING", "DeviceStaging", "HostStaging", "Staged", "Staging", "on_host", "staging_for"]

Staged: TypeAlias = tuple[Sequence[Tensor], Event]
"""Tensors, and when they are there."""


class Staging(Protocol):
    """The way between a device and the host."""

    apart: bool
    """Whether the device has memory of its own."""

    def enter_thread(self) -> None:
        """Called by a thread before it does anything else here."""

    def host_memory(self, layout: Layout) -> Tensor:
        """Memory of the host to receive in."""

    def to_host(self, tensors: Sequence[Tensor]) -> Staged:
        """Copies of `tensors` on the host. Called on the computing thread."""

    def to_device(self, tensors: Sequence[Tensor]) -> Staged:
        """Copies on the device of `tensors`, which are in `host_memory`. Called on any thread."""

    def stay(self, tensors: Sequence[Tensor]) -> Staged:
        """`tensors` themselves, which this thread has computed, for who computes on another stream."""

    def follow(self, staged: Staged) -> Sequence[Tensor]:
        """The tensors, for the stream that this thread computes on, which goes on when they are there."""


class _Now:
    """What has been already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


_NOW = _Now()


def on_host(tensors: Sequence[Tensor]) -> Staged:
    """`tensors`, which are on the host."""
    return tensors, _NOW


NOTHING = on_host(())


class HostStaging:
    """For tensors that are on the host anyway."""

    apart = False

    def enter_thread(self) -> None:
        """The host is every thread's."""

    def host_memory(self, layout: Layout) -> Tensor:
        shape, strides, dtype = layout
        return torch.empty_strided(shape, strides, dtype=dtype)

    def to_host(self, tensors: Sequence[Tensor]) -> Staged:
        return on_host(tensors)

    def to_device(self, tensors: Sequence[Tensor]) -> Staged:
        return on_host(tensors)

    def stay(self, tensors: Sequence[Tensor]) -> Staged:
        return on_host(tensors)

    def follow(self, staged: Staged) -> Sequence[Tensor]:
        return staged[0]


class _Checked:
    """An event that says nothing of what came before it if that was broken off; `check` raises why it was."""

    def __init__(self, event: Event, check: Callable[[], None]) -> None:
        self.query, self._event, self._check = event.query, event, check

    def synchronize(self) -> None:
        self._event.synchronize()
        self._check()


class DeviceStaging:
    """For tensors of `accelerator`, on a stream for copies to the host and one for copies to the device.

    `check` raises why the device was kept from computing them, if it was: what is on the host then is of no use.
    """

    apart = True

    def __init__(self, accelerator: Accelerator, check: Callable[[], None] = lambda: None) -> None:
        self._accelerator, self._check = accelerator, check

    @cached_property
    def _out(self) -> Stream:
        return self._accelerator.stream()

    @cached_property
    def _in(self) -> Stream:
        return self._accelerator.stream()

    def enter_thread(self) -> None:
        self._accelerator.enter_thread()

    def host_memory(self, layout: Layout) -> Tensor:
        return self._accelerator.host_memory(layout)

    def to_host(self, tensors: Sequence[Tensor]) -> Staged:
        accelerator, stream = self._accelerator, self._out
        accelerator.wait(stream, accelerator.record(accelerator.current()))
        copies = []
        for tensor in tensors:
            copy = accelerator.host_memory(_layout(tensor))
            accelerator.copy(copy, tensor.detach(), stream)
            # It was made on the computing stream, which would use its memory again as soon as nobody holds it.
            accelerator.keep(tensor, stream)
            copies.append(copy)
        return copies, _Checked(accelerator.record(stream), self._check)

    def to_device(self, tensors: Sequence[Tensor]) -> Staged:
        accelerator, stream = self._accelerator, self._in
        copies = []
        for tensor in tensors:
            copy = accelerator.device_memory(_layout(tensor), stream)
            accelerator.copy(copy, tensor, stream)
            copies.append(copy)
        return copies, accelerator.record(stream)

    def stay(self, tensors: Sequence[Tensor]) -> Staged:
        return tensors, self._accelerator.record(self._accelerator.current())

    def follow(self, staged: Staged) -> Sequence[Tensor]:
        tensors, event = staged
        if not tensors:
            return tensors
        current = self._accelerator.current()
        self._accelerator.wait(current, event)
        for tensor in tensors:
            # It was made on another stream.
            self._accelerator.keep(tensor, current)
        return tensors


def staging_for(device: torch.device, check: Callable[[], None] = lambda: None) -> Staging:
    """For tensors on `device`: a CPU or a GPU, whose computation fails as `check` says."""
    accelerator = accelerator_of(device)
    return HostStaging() if accelerator is None else DeviceStaging(accelerator, check)


def _layout(tensor: Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.dtype
