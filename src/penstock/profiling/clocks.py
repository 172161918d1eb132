"""Clocks measure how long a piece of work takes, on a CPU or on a CUDA device.

A CUDA kernel is only queued when its call returns, so the wall clock would measure the queueing. Each kind of device
has its own clock with the same method. `ScriptedClock` reads times from a list, so that tests can check the profiler's
arithmetic to the digit.

Laws of this file:
  1. A clock runs the work once, and to its end.
  2. A clock does not depend on layers.
"""

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Protocol

import torch

from penstock.errors import ProfileError

SHORTEST_SAMPLE_SECONDS = 200e-6
"""Calls are timed in groups that take at least this long: a clock's own cost, some 0.1 us on a CPU and some 5 us on a
CUDA device, then stays in the noise. A call under 50 us is timed in groups of four or more."""
MOST_CALLS = 100
"""Calls in one group at most: their results are all alive until the group's backward."""
_HEAD_START_CYCLES = 600_000
"""A CUDA device stands still for this many of its cycles, about 0.3 ms, before work that is timed: the host has queued
some kernels by then, as it has in a training loop. From an idle device, layers of GPT took 6 to 12 % longer."""
WINDOW_SECONDS = 0.05
"""Work runs at least this long for one time: a device that is held up in between shows it."""


class Clock(Protocol):
    """Measures how long work takes."""

    def seconds(self, work: Callable[[], object]) -> float:
        """Runs `work` once, to its end on the device, and returns the seconds it took."""


class WallClock:
    """Reads the time of day, for work that is done when it returns (on a CPU)."""

    __slots__ = ()

    def seconds(self, work: Callable[[], object]) -> float:
        """Runs `work` and returns the seconds until it returned."""
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


class CudaClock:
    """Takes the longer of two times: the host's to queue the work, and the device's to run it. In a training loop the
    one runs beside the other.
    """

    __slots__ = ("device",)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, work: Callable[[], object]) -> float:
        """Runs `work` on the device's current stream and returns the seconds that it would take in a training loop."""
        with torch.cuda.device(self.device):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
            start.record()
            begun = time.perf_counter()
            work()
            queued = time.perf_counter() - begun
            stop.record()
            stop.synchronize()
            return max(queued, float(start.elapsed_time(stop)) / 1e3)


class ScriptedClock:
    """Runs the work and returns the next of the given seconds instead of the time it took."""

    __slots__ = ("script",)

    def __init__(self, script: Iterable[float]) -> None:
        self.script = iter(script)

    def seconds(self, work: Callable[[], object]) -> float:
        """Runs `work` and returns the next seconds of the script."""
        work()
        return next(self.script)


def clock_of(device: torch.device) -> Clock:
    """The clock that is right for `device`. Raises `ProfileError` for a kind of device that no clock here can time."""
    match device.type:
        case "cpu":
            return WallClock()
        case "cuda":
            return CudaClock(device)
        case kind:
            raise ProfileError(
                f"device={device}: expected a cpu or cuda device, found {kind!r}; profile on one of those"
            )


def calls_per_sample(call_seconds: float) -> int:
    """How many calls to time together when one takes about `call_seconds`."""
    if call_seconds * MOST_CALLS <= SHORTEST_SAMPLE_SECONDS:
        return MOST_CALLS
    return max(1, -int(-SHORTEST_SAMPLE_SECONDS // call_seconds))


def median_seconds(samples: Iterable[float]) -> float:
    """The median of some timings: one that the machine disturbed does not move it."""
    return float(median(samples))


def windows(work: Callable[[], object], seconds: float, least: int) -> list[float]:
    """The mean wall time of `work` over each window, in which it runs again and again. As many windows as fit into
    `seconds`, and `least` of them at least.
    """
    started = time.perf_counter()
    found: list[float] = []
    while len(found) < least or time.perf_counter() - started < seconds:
        begun, runs = time.perf_counter(), 0
        while not runs or time.perf_counter() - begun < WINDOW_SECONDS:
            work()
            runs += 1
        found.append((time.perf_counter() - begun) / runs)
    return found
