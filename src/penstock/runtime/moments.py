"""Moments: when something was done, on the host's clock, or when a device will have come so far in its stream.

A device does later what it is told, so what the host sees of an action is how long it took to tell. Marks in the stream
cost a few microseconds and no waiting; what they say is asked for when somebody wants to know.
"""

import time
from collections.abc import Sequence
from typing import Protocol, TypeAlias, cast

import torch

from penstock.runtime.accelerators import Accelerator, Event, accelerator_of

__all__ = ["DeviceMoments", "HostMoments", "Mark", "Moments", "moments_of"]

Mark: TypeAlias = float | Event
"""A moment: in seconds of ``time.perf_counter``, or a place in a stream."""


class Moments(Protocol):
    """How moments are taken and read."""

    def now(self) -> Mark:
        """This one; on a device, the one when all that this thread's stream has in it will be done."""

    def passed(self, mark: Mark) -> bool:
        """Whether it is over."""

    def seconds(self, start: Mark, stop: Mark) -> float:
        """From one moment to another; both are over, or are waited for."""

    def on_clock(self, marks: Sequence[Mark]) -> list[float]:
        """In seconds of ``time.perf_counter``. Waits for all that this thread's stream has in it."""


class HostMoments:
    """Of the host's clock."""

    now = staticmethod(time.perf_counter)

    def passed(self, mark: Mark) -> bool:
        return True

    def seconds(self, start: Mark, stop: Mark) -> float:
        return cast(float, stop) - cast(float, start)

    def on_clock(self, marks: Sequence[Mark]) -> list[float]:
        return [cast(float, mark) for mark in marks]


class DeviceMoments:
    """Of the streams of `accelerator`, whose clock runs by itself: it is set by the host's whenever it is read."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def now(self) -> Mark:
        return self._accelerator.mark()

    def passed(self, mark: Mark) -> bool:
        return cast(Event, mark).query()

    def seconds(self, start: Mark, stop: Mark) -> float:
        for mark in (start, stop):
            cast(Event, mark).synchronize()
        return self._accelerator.seconds(cast(Event, start), cast(Event, stop))

    def on_clock(self, marks: Sequence[Mark]) -> list[float]:
        now = self._accelerator.mark()
        now.synchronize()
        host = time.perf_counter()
        return [host - self.seconds(mark, now) for mark in marks]


def moments_of(device: torch.device) -> Moments:
    """Those of what computes on `device`."""
    accelerator = accelerator_of(device)
    return HostMoments() if accelerator is None else DeviceMoments(accelerator)
