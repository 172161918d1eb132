"""A panel of a picture: one timeline with everything that the picture shows of it, sorted by rank.

A picture has one panel, or two above each other (predicted and measured) on one time axis that starts at 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.timelines.memories import RankMemory
from penstock.timelines.spans import Span
from penstock.values.quantities import bytes_text, seconds_text


@dataclass(frozen=True, slots=True)
class Panel:
    """Holds what is drawn of one timeline. Times in `rows` and `memory` are relative to `origin`."""

    name: str
    """Such as ``predicted`` or ``measured``; empty if there is only one panel."""
    rows: tuple[tuple[Span, ...], ...]
    """The spans of every rank, ascending by start."""
    origin: float
    seconds: float
    bubble: float
    idle_shares: tuple[float, ...]
    memory: tuple[RankMemory, ...]
    critical: tuple[Span, ...]
    """The spans of the critical path, if known."""

    @property
    def headline(self) -> str:
        """The figures of the panel in one line."""
        ranks = len(self.rows)
        parts = [f"{ranks} rank{'s' if ranks > 1 else ''}", seconds_text(self.seconds)]
        parts.append(f"bubble {self.bubble:.1%} of wall time")
        if self.memory:
            peak = max(memory.peak_bytes for memory in self.memory)
            rank = next(rank for rank, memory in enumerate(self.memory) if memory.peak_bytes == peak)
            parts.append(f"peak memory {bytes_text(peak)} on rank {rank}")
        return (f"{self.name}: " if self.name else "") + ", ".join(parts)


def held_stages(row: Sequence[Span]) -> list[int]:
    """The stages of one rank's spans, in order."""
    return sorted({span.stage for span in row})


def peak_words(memory: RankMemory) -> str:
    """The peak memory of a rank, and what it consists of."""
    sizes = {
        "weights": memory.weight_bytes,
        "optimizer": memory.optimizer_bytes,
        "master weights": memory.master_bytes,
        "libraries": memory.library_bytes,
        "activations up to": max((size for _, size in memory.activations), default=0.0),
        "messages and gradients up to": max((size for _, size in memory.buffers), default=0.0),
    }
    text = ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes.items() if size > 0)
    return f"peak {bytes_text(memory.peak_bytes)}" + (f": {text}" if text else "")
