"""The memory of a rank over time: a constant amount, and amounts that change.

The simulator predicts it from the schedule. A picture shows it below the timeline, and a planner uses it to decide
whether a plan fits. Sizes are in bytes, times in seconds as in the timeline that it belongs to.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from typing import TypeAlias

MemoryCurve: TypeAlias = tuple[tuple[float, float], ...]
"""(seconds, bytes from then on), ascending; nothing is held before the first entry."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Holds the memory of one rank: its constant memory, and the curves of what changes."""

    weight_bytes: float
    """All weight versions on the device, and what is not trained."""
    optimizer_bytes: float
    """The optimizer's state, unless it is on the host."""
    master_bytes: float = 0.0
    """Full-precision copies of the weights."""
    activations: MemoryCurve = ()
    """Tensors that forwards keep until their backward, and those that a recomputation produces."""
    buffers: MemoryCurve = ()
    """Messages that have arrived and are not used yet, or that are not sent yet; and the gradients of weights, from the
    end of the first backward that produces them to the end of the update that uses them; and what visits of streamed
    stages bring."""
    library_bytes: float = 0.0
    """What libraries keep (`Profile.library_bytes`)."""

    @property
    def constant_bytes(self) -> float:
        """The bytes that the rank holds from start to end."""
        return self.weight_bytes + self.optimizer_bytes + self.master_bytes + self.library_bytes

    @property
    def peak_bytes(self) -> float:
        """The most that the rank holds at one time."""
        return max((size for _, size in self.total_curve()), default=self.constant_bytes)

    def total_curve(self) -> Iterator[tuple[float, float]]:
        """(seconds, bytes of everything from then on), ascending, one entry for each time of change."""
        latest = [0.0, 0.0]
        current: float | None = None
        curves = enumerate((self.activations, self.buffers))
        changes = merge(*([(at, index, size) for at, size in curve] for index, curve in curves))
        for at, index, size in changes:
            if current is not None and at > current:
                yield current, self.constant_bytes + sum(latest)
            current, latest[index] = at, size
        if current is not None:
            yield current, self.constant_bytes + sum(latest)
