"""What a rank holds in memory, over time: constant parts, and parts that come and go.

The simulator predicts it from the schedule, so that a picture can show it below the timeline and a planner can say
whether a plan fits. Bytes; seconds as in the timeline that it belongs to.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from typing import TypeAlias

__all__ = ["MemoryCurve", "RankMemory"]

MemoryCurve: TypeAlias = tuple[tuple[float, float], ...]
"""(seconds, bytes from then on), ascending; nothing is held before the first entry."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one rank: what it always holds, and the courses of what it holds for a while."""

    weight_bytes: float
    """All weight versions."""
    optimizer_bytes: float
    """The optimizer's state."""
    master_bytes: float = 0.0
    """Weights of full precision beside those that compute."""
    activations: MemoryCurve = ()
    """What forwards keep until their backward, and what a recomputation makes again."""
    buffers: MemoryCurve = ()
    """Messages that have arrived and are not used yet, and those that are not sent yet; and the gradients of weights,
    from the end of the first backward that makes them to the end of the update that takes them."""

    @property
    def constant_bytes(self) -> float:
        """What is held from start to end."""
        return self.weight_bytes + self.optimizer_bytes + self.master_bytes

    @property
    def peak_bytes(self) -> float:
        """The most that is held at one time."""
        return max((size for _, size in self.course()), default=self.constant_bytes)

    def course(self) -> Iterator[tuple[float, float]]:
        """(seconds, bytes of everything from then on), ascending, one entry for each moment of change."""
        latest = [0.0, 0.0]
        moment: float | None = None
        changes = merge(*([(at, part, size) for at, size in course] for part, course in enumerate(self._courses())))
        for at, part, size in changes:
            if moment is not None and at > moment:
                yield moment, self.constant_bytes + sum(latest)
            moment, latest[part] = at, size
        if moment is not None:
            yield moment, self.constant_bytes + sum(latest)

    def _courses(self) -> tuple[MemoryCurve, MemoryCurve]:
        return self.activations, self.buffers
