"""A host that several ranks share: their computations slow each other down.

Processes of one machine share cores, caches and memory. Every computation has an amount of work: its seconds when it
runs alone. While k ranks compute, each of them is ``slowdowns[k - 1]`` times as slow. All rates change at once when a
computation starts or ends, so that the times are exact for this model, not a sum of averages.
"""

from collections.abc import Sequence
from math import inf


class SharedHost:
    """Tracks the computations that run at the current time, which only moves forward."""

    def __init__(self, slowdowns: Sequence[float]) -> None:
        self._slowdowns = slowdowns
        self._work: dict[int, float] = {}
        """Remaining seconds of work, by rank."""
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._work)

    def begin(self, rank: int, work: float, seconds: float) -> None:
        """Starts `work` seconds of work on `rank` at the time `seconds`, which must not go back."""
        self._move(seconds)
        self._work[rank] = work

    def next_end(self) -> float:
        """When the next computation ends, if none starts before; infinite if there is none."""
        return self._clock + min(self._work.values()) * self._rate() if self._work else inf

    def end(self) -> tuple[int, float]:
        """Ends the computation that ends next; returns its rank and the time. Of several, that of the lowest rank."""
        seconds = self.next_end()
        rank = min(self._work, key=lambda rank: (self._work[rank], rank))
        self._move(seconds)
        del self._work[rank]
        return rank, seconds

    def _move(self, seconds: float) -> None:
        done = (seconds - self._clock) / self._rate() if self._work else 0.0
        for rank in self._work:
            self._work[rank] = max(0.0, self._work[rank] - done)
        self._clock = seconds

    def _rate(self) -> float:
        """Seconds per second of work; for more ranks than were measured, in proportion to the last."""
        busy, known = len(self._work), len(self._slowdowns)
        return self._slowdowns[busy - 1] if busy <= known else self._slowdowns[-1] * busy / known
