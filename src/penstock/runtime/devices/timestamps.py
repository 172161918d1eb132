"""Timestamps of actions: on the host's clock, or of the position that a device reaches in its stream.

A device executes work after the host has queued it, so the host's clock only shows how long queueing took. Timed events
in the stream cost a few microseconds and block nothing. They are read only on demand.
"""

import time
from collections.abc import Sequence
from typing import TypeAlias, cast

import torch

from penstock.runtime.devices.accelerators import Accelerator, Event, accelerator_of

Timestamp: TypeAlias = float | Event
"""Seconds of ``time.perf_counter``, or a timed event in a stream."""


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

    def now(self) -> Event:
        """A timestamp of the end of all work that is in this thread's current stream."""
        return self._accelerator.record_timed_event()

    def passed(self, timestamp: Timestamp) -> bool:
        """Whether the timestamp has been reached."""
        return cast(Event, timestamp).query()

    def seconds(self, start: Timestamp, stop: Timestamp) -> float:
        """The seconds between two timestamps. Blocks until both have been reached."""
        begun, ended = cast(Event, start), cast(Event, stop)
        begun.synchronize()
        ended.synchronize()
        return self._accelerator.seconds(begun, ended)

    def to_host_seconds(self, timestamps: Sequence[Timestamp]) -> list[float]:
        """Converts timestamps to seconds of ``time.perf_counter``. Blocks until the work in this thread's current
        stream is done.
        """
        now = self.now()
        now.synchronize()
        host = time.perf_counter()
        return [host - self.seconds(timestamp, now) for timestamp in timestamps]


Timer: TypeAlias = HostTimer | DeviceTimer
"""Takes and reads timestamps."""


def timer_for(device: torch.device) -> Timer:
    """Makes the timer for computation on `device`."""
    accelerator = accelerator_of(device)
    return HostTimer() if accelerator is None else DeviceTimer(accelerator)
