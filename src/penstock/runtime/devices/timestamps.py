"""Timestamps of actions: on the host's clock, or of the position that a device reaches in its stream.

A device executes work after the host has queued it, so the host's clock only shows how long queueing took. Timed events
in the stream cost a few microseconds and block nothing. They are read only on demand.

Creating an event costs more than recording it, and every action needs two, whether or not they are ever read. So the
event of a timestamp that is no longer referenced is recorded again. The timings of the last minibatches, the checks of
predictions and open timelines hold references; none of them has to release anything explicitly.
"""

import time
from collections.abc import Sequence
from typing import TypeAlias, cast

import torch

from penstock.runtime.devices.accelerators import Accelerator, Event, accelerator_of


class _EventTimestamp:
    """The position of `event` in a stream. When the timestamp is no longer referenced, its event goes to `free`."""

    __slots__ = ("_free", "event")

    def __init__(self, event: Event, free: list[Event]) -> None:
        self.event, self._free = event, free

    def __del__(self) -> None:
        self._free.append(self.event)


Timestamp: TypeAlias = float | _EventTimestamp
"""Seconds of ``time.perf_counter``, or a position in a stream."""


class HostTimer:
    """Reads the host's clock. The methods are those of `DeviceTimer`."""

    now = staticmethod(time.perf_counter)

    def passed(self, timestamp: Timestamp) -> bool:
        return True

    def seconds(self, start: Timestamp, stop: Timestamp) -> float:
        return cast(float, stop) - cast(float, start)

    def to_host_seconds(self, timestamps: Sequence[Timestamp]) -> list[float]:
        return [cast(float, timestamp) for timestamp in timestamps]


class DeviceTimer:
    """Reads the streams of `accelerator`. Each conversion to host seconds synchronizes the two clocks."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._free: list[Event] = []
        """Events of dropped timestamps. Threads pop and append them, both atomic operations."""

    def now(self) -> _EventTimestamp:
        """A timestamp of the end of all work that is in this thread's current stream."""
        try:
            event: Event | None = self._free.pop()
        except IndexError:
            event = None
        return _EventTimestamp(self._accelerator.record_timed_event(event), self._free)

    def passed(self, timestamp: Timestamp) -> bool:
        """Whether the timestamp has been reached."""
        return cast(_EventTimestamp, timestamp).event.query()

    def seconds(self, start: Timestamp, stop: Timestamp) -> float:
        """The seconds between two timestamps. Blocks until both have been reached."""
        begun, ended = cast(_EventTimestamp, start).event, cast(_EventTimestamp, stop).event
        begun.synchronize()
        ended.synchronize()
        return self._accelerator.seconds(begun, ended)

    def to_host_seconds(self, timestamps: Sequence[Timestamp]) -> list[float]:
        """Converts timestamps to seconds of ``time.perf_counter``. Blocks until the work in this thread's current
        stream is done.
        """
        now = self.now()
        now.event.synchronize()
        host = time.perf_counter()
        return [host - self.seconds(timestamp, now) for timestamp in timestamps]


Timer: TypeAlias = HostTimer | DeviceTimer
"""Takes and reads timestamps."""


def timer_for(device: torch.device) -> Timer:
    """Makes the timer for computation on `device`."""
    accelerator = accelerator_of(device)
    return HostTimer() if accelerator is None else DeviceTimer(accelerator)
