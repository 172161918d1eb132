"""Sharing: computations of several ranks on one host slow each other down.

Processes of one machine share cores, caches and memory. Here every computation has an amount of work, its seconds when
it is alone; while k ranks compute, each of them gets through it ``slowdowns[k - 1]`` times as slowly. All rates change
at once when a computation begins or ends, so that the times are exact for this model, not a sum of averages.
"""

from collections.abc import Sequence
from math import inf

__all__ = ["Sharing"]


class Sharing:
    """What is being computed at a moment that only moves forward."""

    def __init__(self, slowdowns: Sequence[float]) -> None:
        self._slowdowns = slowdowns
        self._work: dict[int, float] = {}
        """Seconds of work that are left, by rank."""
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._work)

    def begin(self, rank: int, work: float, seconds: float) -> None:
        """`rank` begins with so much work at the moment `seconds`, not before any that was spoken of earlier."""
        self._move(seconds)
        self._work[rank] = work

    def next_end(self) -> float:
        """When the next computation ends, if none begins before; infinite if there is none."""
        return self._clock + min(self._work.values()) * self._rate() if self._work else inf

    def end(self) -> tuple[int, float]:
        """Ends the computation that ends next: its rank, and when. Of several at once, that of the lowest rank."""
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
        """Seconds for a second of work; for more ranks than were measured, in proportion to the last."""
        busy, known = len(self._work), len(self._slowdowns)
        return self._slowdowns[busy - 1] if busy <= known else self._slowdowns[-1] * busy / known
