"""Moments: when something was done, on the host's clock, or when a device will have come so far in its stream.

A device does later what it is told, so what the host sees of an action is how long it took to tell. Marks in the stream
cost a few microseconds and no waiting; what they say is asked for when somebody wants to know.

To make an event costs more than to record it, and there are two for every action, whether or not anybody asks. So an
event is recorded again once nobody refers to its mark. What refers to a mark is a record of the last minibatches, a
forecast, or whoever reads a timeline; none of them has to give anything back.
"""

import time
from collections.abc import Sequence
from typing import Protocol, TypeAlias, cast

import torch

from penstock.runtime.devices.accelerators import Accelerator, Event, accelerator_of

__all__ = ["DeviceTimer", "EventTimestamp", "HostTimer", "Timer", "Timestamp", "timer_for"]


class EventTimestamp:
    """A place in a stream, which `event` is at. It goes to `free` when nobody refers to the mark any more."""

    __slots__ = ("_free", "event")

    def __init__(self, event: Event, free: list[Event]) -> None:
        self.event, self._free = event, free

    def __del__(self) -> None:
        self._free.append(self.event)


Timestamp: TypeAlias = float | EventTimestamp
"""A moment: in seconds of ``time.perf_counter``, or a place in a stream."""


class Timer(Protocol):
    """How moments are taken and read."""

    def now(self) -> Timestamp:
        """This one; on a device, the one when all that this thread's stream has in it will be done."""

    def passed(self, mark: Timestamp) -> bool:
        """Whether it is over."""

    def seconds(self, start: Timestamp, stop: Timestamp) -> float:
        """From one moment to another; both are over, or are waited for."""

    def on_clock(self, marks: Sequence[Timestamp]) -> list[float]:
        """In seconds of ``time.perf_counter``. Waits for all that this thread's stream has in it."""


class HostTimer:
    """Of the host's clock."""

    now = staticmethod(time.perf_counter)

    def passed(self, mark: Timestamp) -> bool:
        return True

    def seconds(self, start: Timestamp, stop: Timestamp) -> float:
        return cast(float, stop) - cast(float, start)

    def on_clock(self, marks: Sequence[Timestamp]) -> list[float]:
        return [cast(float, mark) for mark in marks]


class DeviceTimer:
    """Of the streams of `accelerator`, whose clock runs by itself: it is set by the host's whenever it is read."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._free: list[Event] = []
        """Events of marks that are gone. Threads take from it and add to it, each by one call that is not divided."""

    def now(self) -> EventTimestamp:
        try:
            event: Event | None = self._free.pop()
        except IndexError:
            event = None
        return EventTimestamp(self._accelerator.mark(event), self._free)

    def passed(self, mark: Timestamp) -> bool:
        return cast(EventTimestamp, mark).event.query()

    def seconds(self, start: Timestamp, stop: Timestamp) -> float:
        begun, ended = cast(EventTimestamp, start).event, cast(EventTimestamp, stop).event
        begun.synchronize()
        ended.synchronize()
        return self._accelerator.seconds(begun, ended)

    def on_clock(self, marks: Sequence[Timestamp]) -> list[float]:
        now = self.now()
        now.event.synchronize()
        host = time.perf_counter()
        return [host - self.seconds(mark, now) for mark in marks]


def timer_for(device: torch.device) -> Timer:
    """Those of what computes on `device`."""
    accelerator = accelerator_of(device)
    return HostTimer() if accelerator is None else DeviceTimer(accelerator)
