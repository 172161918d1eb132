"""The machines: how many devices, how much memory each, and how fast the links between them.

Links are either a hierarchy (a server of 4 devices, 4 such servers; SOSP'19, figure 7) or a matrix that was measured.
Bandwidths are bytes per second, one way. Latencies are the seconds that a message takes however small it is, one way:
a message of n bytes takes latency + n / bandwidth seconds.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, assert_never

from penstock.errors import PlanError
from penstock.values.documents import YamlNode, is_count, number_text, read_yaml, text_of, write_text

__all__ = ["Cluster", "LinkLevels", "LinkMatrix", "Links"]

_FORMAT = "penstock-cluster/1"


@dataclass(frozen=True, slots=True)
class LinkLevels:
    """Level k joins `count` components of level k - 1; a component of level 0 is one device."""

    levels: tuple[tuple[int, float], ...]
    """(count, bytes per second), innermost first. Ranks are numbered server by server."""
    latency_seconds: tuple[float, ...] = ()
    """One per level; none at all stands for zeros."""

    def __post_init__(self) -> None:
        if not self.levels:
            raise PlanError("levels: expected one level or more, found none: give (count, bytes per second) per level")
        for index, (count, bandwidth) in enumerate(self.levels):
            if not is_count(count, least=1):
                raise PlanError(
                    f"levels[{index}].count: expected a whole number, 1 or more, found {text_of(count)}: "
                    "give the number of components that this level joins"
                )
            _check_bandwidth(f"levels[{index}].bytes_per_second", bandwidth)
        if not self.latency_seconds:
            object.__setattr__(self, "latency_seconds", (0.0,) * len(self.levels))
        if len(self.latency_seconds) != len(self.levels):
            raise PlanError(
                f"latency_seconds: expected {len(self.levels)} numbers (one per level), found "
                f"{len(self.latency_seconds)}: give one number for each level, or a single one for all"
            )
        for index, latency in enumerate(self.latency_seconds):
            _check_latency(f"levels[{index}].latency_seconds", latency)

    @property
    def devices(self) -> int:
        """The product of the counts."""
        return math.prod(count for count, _ in self.levels)

    def bandwidth(self, a: int, b: int) -> float:
        """Bytes per second of the innermost level that joins ranks `a` and `b`."""
        return self.levels[self._joining(a, b)][1]

    def latency(self, a: int, b: int) -> float:
        """Seconds of the innermost level that joins ranks `a` and `b`."""
        return self.latency_seconds[self._joining(a, b)]

    def _joining(self, a: int, b: int) -> int:
        size = 1
        for index, (count, _) in enumerate(self.levels):
            size *= count
            if a // size == b // size:
                return index
        raise AssertionError("the outermost level joins all ranks")


@dataclass(frozen=True, slots=True)
class LinkMatrix:
    """Every pair of devices has its own bandwidth."""

    rows: tuple[tuple[float, ...], ...]
    """Row a, column b: bytes per second from rank a to rank b. The diagonal is not used."""
    latency_rows: tuple[tuple[float, ...], ...] = ()
    """Row a, column b: seconds from rank a to rank b; none at all stands for zeros. The diagonal is not used."""

    def __post_init__(self) -> None:
        if not self.rows:
            raise PlanError("matrix: expected one row or more, found none: give one row per device")
        _check_square("matrix", self.rows, len(self.rows), _check_bandwidth)
        if not self.latency_rows:
            object.__setattr__(self, "latency_rows", ((0.0,) * len(self.rows),) * len(self.rows))
        _check_square("latency_seconds", self.latency_rows, len(self.rows), _check_latency)

    @property
    def devices(self) -> int:
        """The number of rows."""
        return len(self.rows)

    def bandwidth(self, a: int, b: int) -> float:
        """Bytes per second from rank `a` to rank `b`."""
        return self.rows[a][b]

    def latency(self, a: int, b: int) -> float:
        """Seconds from rank `a` to rank `b`."""
        return self.latency_rows[a][b]


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
    def uniform(
        cls, devices: int, bandwidth: float, memory_bytes: float | None = None, latency_seconds: float = 0.0
    ) -> "Cluster":
        """`devices` devices; `bandwidth` bytes per second and `latency_seconds` between any two. Raises `PlanError`."""
        return cls.hierarchical([(devices, bandwidth)], memory_bytes, latency_seconds)

    @classmethod
    def hierarchical(
        cls,
        levels: Iterable[tuple[int, float]],
        memory_bytes: float | None = None,
        latency_seconds: float | Sequence[float] = 0.0,
    ) -> "Cluster":
        """`levels` of (count, bytes per second), innermost first: [(4, 12e9), (4, 1.25e9)].

        `latency_seconds`: one for each level, or one for all. Raises `PlanError`.
        """
        pairs = tuple((count, bandwidth) for count, bandwidth in levels)
        if isinstance(latency_seconds, Sequence):
            return cls(LinkLevels(pairs, tuple(latency_seconds)), memory_bytes)
        return cls(LinkLevels(pairs, (latency_seconds,) * len(pairs)), memory_bytes)

    @classmethod
    def from_matrix(
        cls,
        bandwidth: Sequence[Sequence[float]],
        memory_bytes: float | None = None,
        latency_seconds: float | Sequence[Sequence[float]] = 0.0,
    ) -> "Cluster":
        """Row a, column b of `bandwidth`: bytes per second from rank a to rank b. Raises `PlanError`.

        `latency_seconds`: a matrix of the same shape, or one number for all links.
        """
        rows = tuple(tuple(float(value) for value in row) for row in bandwidth)
        if isinstance(latency_seconds, Sequence):
            latencies = tuple(tuple(float(value) for value in row) for row in latency_seconds)
        else:
            latencies = ((latency_seconds,) * len(rows),) * len(rows)
        return cls(LinkMatrix(rows, latencies), memory_bytes)

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
        self._check_ranks(a, b)
        return math.inf if a == b else self.links.bandwidth(a, b)

    def latency(self, a: int, b: int) -> float:
        """Seconds that the smallest message takes from rank `a` to rank `b`, 0 from a rank to itself.

        Raises `PlanError`.
        """
        self._check_ranks(a, b)
        return 0.0 if a == b else self.links.latency(a, b)

    def transfer_seconds(self, size_bytes: float, a: int, b: int) -> float:
        """Seconds that a message of `size_bytes` takes from rank `a` to rank `b`, 0 from a rank to itself.

        Raises `PlanError`.
        """
        return self.latency(a, b) + size_bytes / self.bandwidth(a, b)

    def save(self, path: str | Path) -> None:
        """Writes YAML. `PlanError` if the file cannot be written."""
        lines = [f"format: {_FORMAT}"]
        if self.memory_bytes is not None:
            lines.append(f"memory_bytes: {number_text(self.memory_bytes)}")
        match self.links:
            case LinkLevels(levels, latencies):
                lines.append("levels: # innermost first")
                for (count, speed), latency in zip(levels, latencies, strict=True):
                    more = f", latency_seconds: {number_text(latency)}" if latency else ""
                    lines.append(f"- {{count: {count}, bytes_per_second: {number_text(speed)}{more}}}")
            case LinkMatrix(rows, latencies):
                lines.append("matrix: # row a, column b: bytes per second from rank a to rank b")
                lines += [f"- [{', '.join(number_text(value) for value in row)}]" for row in rows]
                if any(map(any, latencies)):
                    lines.append("latency_seconds: # row a, column b: of the smallest message from rank a to rank b")
                    lines += [f"- [{', '.join(number_text(value) for value in row)}]" for row in latencies]
            case _:
                assert_never(self.links)
        write_text(path, "\n".join(lines) + "\n", PlanError)

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """Reads what `save` wrote, perhaps edited. `PlanError` names the file, the field and the fix."""
        place = read_yaml(path, PlanError)
        place.check_format(_FORMAT)
        places = place.mapping(("format",), ("memory_bytes", "levels", "matrix", "latency_seconds"))
        if ("levels" in places) == ("matrix" in places):
            found = "both" if "levels" in places else "neither"
            raise PlanError(f"{path}: expected either `levels` or `matrix`, found {found}: describe the links once")
        memory = places["memory_bytes"].number() if "memory_bytes" in places else None
        if "levels" in places:
            if "latency_seconds" in places:
                places["latency_seconds"].fail("no such key beside `levels`", "write latency_seconds inside each level")
            read = [_read_level(level) for level in places["levels"].items()]
            levels, latencies = tuple(level for level, _ in read), tuple(latency for _, latency in read)
            return place.build(lambda: cls(LinkLevels(levels, latencies), memory))
        rows = _read_rows(places["matrix"])
        if "latency_seconds" not in places:
            return place.build(lambda: cls(LinkMatrix(rows), memory))
        latency = places["latency_seconds"]
        one_or_rows = _read_rows(latency) if isinstance(latency.value, list) else latency.number()
        return place.build(lambda: cls.from_matrix(rows, memory, one_or_rows))

    def _check_ranks(self, *ranks: int) -> None:
        for rank in ranks:
            if not 0 <= rank < self.devices:
                raise PlanError(
                    f"rank {rank} is not in this cluster: expected 0 to {self.devices - 1}. "
                    "Use fewer ranks or describe more devices"
                )


def _read_level(place: YamlNode) -> tuple[tuple[int, float], float]:
    places = place.mapping(("count", "bytes_per_second"), ("latency_seconds",))
    latency = places["latency_seconds"].number() if "latency_seconds" in places else 0.0
    return (places["count"].integer(), places["bytes_per_second"].number()), latency


def _read_rows(place: YamlNode) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(value.number() for value in row.items()) for row in place.items())


def _check_square(where: str, rows: Sequence[Sequence[float]], size: int, check: Callable[[str, float], None]) -> None:
    """`size` rows of `size` numbers, each of which, but for the diagonal, passes `check`."""
    if len(rows) != size:
        raise PlanError(f"{where}: expected {size} rows (one per device), found {len(rows)}: give a square matrix")
    for a, row in enumerate(rows):
        if len(row) != size:
            raise PlanError(
                f"{where}[{a}]: expected {size} numbers (one per device), found {len(row)}: give a square matrix"
            )
        for b, value in enumerate(row):
            if a != b:
                check(f"{where}[{a}][{b}]", value)


def _check_bandwidth(where: str, bandwidth: float) -> None:
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, int | float) or not bandwidth > 0:
        raise PlanError(
            f"{where}: expected a number above 0, found {text_of(bandwidth)}: "
            "give the measured bytes per second of the link (`penstock probe` measures it)"
        )


def _check_latency(where: str, latency: float) -> None:
    if isinstance(latency, bool) or not isinstance(latency, int | float) or not 0 <= latency < math.inf:
        raise PlanError(
            f"{where}: expected a finite number, 0 or more, found {text_of(latency)}: "
            "give the seconds that the smallest message takes (`penstock probe` measures it), or leave it out"
        )
