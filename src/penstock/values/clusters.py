"""The machines: how many devices, how much memory each, and how fast the links between them.

Links are either a hierarchy (a server of 4 devices, 4 such servers; SOSP'19, figure 7) or a matrix that was measured.
Bandwidths are bytes per second, one way.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, assert_never

from penstock.errors import PlanError
from penstock.values.documents import Place, number_text, read_yaml, text_of, write_text

__all__ = ["Cluster", "LinkLevels", "LinkMatrix", "Links"]

_FORMAT = "penstock-cluster/1"


@dataclass(frozen=True, slots=True)
class LinkLevels:
    """Level k joins `count` components of level k - 1; a component of level 0 is one device."""

    levels: tuple[tuple[int, float], ...]
    """(count, bytes per second), innermost first. Ranks are numbered server by server."""

    def __post_init__(self) -> None:
        if not self.levels:
            raise PlanError("levels: expected one level or more, found none: give (count, bytes per second) per level")
        for index, (count, bandwidth) in enumerate(self.levels):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise PlanError(
                    f"levels[{index}].count: expected a whole number, 1 or more, found {text_of(count)}: "
                    "give the number of components that this level joins"
                )
            _check_bandwidth(f"levels[{index}].bytes_per_second", bandwidth)

    @property
    def devices(self) -> int:
        """The product of the counts."""
        return math.prod(count for count, _ in self.levels)

    def bandwidth(self, a: int, b: int) -> float:
        """Bytes per second of the innermost level that joins ranks `a` and `b`."""
        size = 1
        for count, bandwidth in self.levels:
            size *= count
            if a // size == b // size:
                return bandwidth
        raise AssertionError("the outermost level joins all ranks")


@dataclass(frozen=True, slots=True)
class LinkMatrix:
    """Every pair of devices has its own bandwidth."""

    rows: tuple[tuple[float, ...], ...]
    """Row a, column b: bytes per second from rank a to rank b. The diagonal is not used."""

    def __post_init__(self) -> None:
        if not self.rows:
            raise PlanError("matrix: expected one row or more, found none: give one row per device")
        for a, row in enumerate(self.rows):
            if len(row) != len(self.rows):
                raise PlanError(
                    f"matrix[{a}]: expected {len(self.rows)} numbers (one per device), found {len(row)}: "
                    "give a square matrix"
                )
            for b, bandwidth in enumerate(row):
                if a != b:
                    _check_bandwidth(f"matrix[{a}][{b}]", bandwidth)

    @property
    def devices(self) -> int:
        """The number of rows."""
        return len(self.rows)

    def bandwidth(self, a: int, b: int) -> float:
        """Bytes per second from rank `a` to rank `b`."""
        return self.rows[a][b]


Links: TypeAlias = LinkLevels | LinkMatrix


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices and the links between them."""

    links: Links
    memory_bytes: float | None = None
    """Of each device; None means that memory is no limit."""

    def __post_init__(self) -> None:
        memory = self.memory_bytes
        if memory is not None and (
            isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 < memory < math.inf
        ):
            raise PlanError(
                f"memory_bytes: expected a finite number above 0, found {text_of(memory)}: "
                "give the memory of one device in bytes, or leave it out if it is no limit"
            )

    @classmethod
    def uniform(cls, devices: int, bandwidth: float, memory_bytes: float | None = None) -> "Cluster":
        """`devices` devices, `bandwidth` bytes per second between any two. Raises `PlanError`."""
        return cls(LinkLevels(((devices, bandwidth),)), memory_bytes)

    @classmethod
    def hierarchical(cls, levels: Iterable[tuple[int, float]], memory_bytes: float | None = None) -> "Cluster":
        """`levels` of (count, bytes per second), innermost first: [(4, 12e9), (4, 1.25e9)]. Raises `PlanError`."""
        return cls(LinkLevels(tuple((count, bandwidth) for count, bandwidth in levels)), memory_bytes)

    @classmethod
    def from_matrix(cls, bandwidth: Sequence[Sequence[float]], memory_bytes: float | None = None) -> "Cluster":
        """Row a, column b of `bandwidth`: bytes per second from rank a to rank b. Raises `PlanError`."""
        rows = tuple(tuple(float(value) for value in row) for row in bandwidth)
        return cls(LinkMatrix(rows), memory_bytes)

    @property
    def devices(self) -> int:
        """The number of devices; a rank is one of them."""
        return self.links.devices

    @property
    def levels(self) -> tuple[tuple[int, float], ...]:
        """(count, bytes per second), innermost first. `PlanError` if the links are a matrix."""
        match self.links:
            case LinkLevels(levels):
                return levels
            case LinkMatrix():
                raise PlanError(
                    f"the links of this cluster are a matrix of {self.devices} devices and have no levels: "
                    "use bandwidth(a, b), or describe the cluster with Cluster.hierarchical"
                )
            case _:
                assert_never(self.links)

    @property
    def slowest(self) -> float:
        """The least bandwidth between two ranks, bytes per second; infinite for one device."""
        match self.links:
            case LinkLevels(levels):
                return min((bandwidth for count, bandwidth in levels if count > 1), default=math.inf)
            case LinkMatrix(rows):
                pairs = (value for a, row in enumerate(rows) for b, value in enumerate(row) if a != b)
                return min(pairs, default=math.inf)
            case _:
                assert_never(self.links)

    def bandwidth(self, a: int, b: int) -> float:
        """Bytes per second from rank `a` to rank `b`, infinite from a rank to itself. Raises `PlanError`."""
        for rank in (a, b):
            if not 0 <= rank < self.devices:
                raise PlanError(
                    f"rank {rank} is not in this cluster: expected 0 to {self.devices - 1}. "
                    "Use fewer ranks or describe more devices"
                )
        return math.inf if a == b else self.links.bandwidth(a, b)

    def save(self, path: str | Path) -> None:
        """Writes YAML. `PlanError` if the file cannot be written."""
        lines = [f"format: {_FORMAT}"]
        if self.memory_bytes is not None:
            lines.append(f"memory_bytes: {number_text(self.memory_bytes)}")
        match self.links:
            case LinkLevels(levels):
                lines.append("levels: # innermost first")
                lines += [f"- {{count: {count}, bytes_per_second: {number_text(speed)}}}" for count, speed in levels]
            case LinkMatrix(rows):
                lines.append("matrix: # row a, column b: bytes per second from rank a to rank b")
                lines += [f"- [{', '.join(number_text(value) for value in row)}]" for row in rows]
            case _:
                assert_never(self.links)
        write_text(path, "\n".join(lines) + "\n", PlanError)

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """Reads what `save` wrote, perhaps edited. `PlanError` names the file, the field and the mend."""
        place = read_yaml(path, PlanError)
        place.check_format(_FORMAT)
        places = place.mapping(("format",), ("memory_bytes", "levels", "matrix"))
        if ("levels" in places) == ("matrix" in places):
            found = "both" if "levels" in places else "neither"
            raise PlanError(f"{path}: expected either `levels` or `matrix`, found {found}: describe the links once")
        memory = places["memory_bytes"].number() if "memory_bytes" in places else None
        if "levels" in places:
            levels = tuple(_read_level(level) for level in places["levels"].items())
            return place.build(lambda: cls(LinkLevels(levels), memory))
        rows = tuple(tuple(value.number() for value in row.items()) for row in places["matrix"].items())
        return place.build(lambda: cls(LinkMatrix(rows), memory))


def _read_level(place: Place) -> tuple[int, float]:
    places = place.mapping(("count", "bytes_per_second"))
    return places["count"].integer(), places["bytes_per_second"].number()


def _check_bandwidth(where: str, bandwidth: float) -> None:
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, int | float) or not bandwidth > 0:
        raise PlanError(
            f"{where}: expected a number above 0, found {text_of(bandwidth)}: "
            "give the measured bytes per second of the link (`penstock probe` measures it)"
        )
