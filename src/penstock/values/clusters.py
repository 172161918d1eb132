"""The machines: how many devices, how much memory each, and how fast the links between them.

Links are either a hierarchy (4 servers of 4 devices each; [PipeDream 2019, figure 7]) or a measured matrix. Bandwidths
are bytes per second, and latencies are the seconds that the smallest message takes, both in one direction: a message of
n bytes takes latency + n / bandwidth seconds. Besides, messages and actions take time of the ranks themselves, which
cannot compute meanwhile: see `MessageCosts` and `Cluster.action_seconds`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, assert_never

from penstock.arguments import Rule, check_fields, entries, instance, integer, is_number, number, text_of
from penstock.errors import PlanError
from penstock.values.documents import YamlNode, number_text, read_yaml, write_text
from penstock.values.message_costs import COST_KEYS, FREE, MessageCosts, read_cost, read_costs, write_costs

__all__ = ["Cluster", "LinkLevels", "LinkMatrix", "Links"]

_FORMAT = "penstock-cluster/1"

_BANDWIDTH = number(above=0, infinite=True).but(
    "give the measured bytes per second of the link (`penstock probe` measures it)"
)
_LATENCY = number(0).but(
    "give the seconds that the smallest message takes (`penstock probe` measures it), or leave it out"
)


@dataclass(frozen=True, slots=True)
class LinkLevels:
    """A hierarchy: level k joins `count` components of level k - 1, and level 0 joins `count` devices."""

    levels: tuple[tuple[int, float], ...]
    """(count, bytes per second), innermost first. Ranks are numbered server by server."""
    latency_seconds: tuple[float, ...] = ()
    """One per level; empty means zeros."""
    message_costs: tuple[MessageCosts, ...] = ()
    """One per level; empty means that messages take no time of the ranks."""

    def __post_init__(self) -> None:
        if not self.levels:
            raise PlanError("levels: expected one level or more, found none: give (count, bytes per second) per level")
        levels = tuple(_check_level(index, level) for index, level in enumerate(self.levels))
        object.__setattr__(self, "levels", levels)
        if not self.latency_seconds:
            object.__setattr__(self, "latency_seconds", (0.0,) * len(self.levels))
        if len(self.latency_seconds) != len(self.levels):
            raise PlanError(
                f"latency_seconds: expected {len(self.levels)} numbers (one per level), found "
                f"{len(self.latency_seconds)}: give one number for each level, or a single one for all"
            )
        latencies = (
            _LATENCY.check(f"levels[{index}].latency_seconds", latency, PlanError)
            for index, latency in enumerate(self.latency_seconds)
        )
        object.__setattr__(self, "latency_seconds", tuple(latencies))
        costs = entries("message_costs", self.message_costs, PlanError) or (FREE,) * len(self.levels)
        if len(costs) != len(self.levels):
            raise PlanError(f"message_costs: expected {len(self.levels)} (one per level), found {len(costs)}: give all")
        object.__setattr__(self, "message_costs", _check_costs("levels", costs))

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

    def costs(self, a: int, b: int) -> MessageCosts:
        """What a message costs on the innermost level that joins ranks `a` and `b`."""
        return self.message_costs[self._joining(a, b)]

    def _joining(self, a: int, b: int) -> int:
        size = 1
        for index, (count, _) in enumerate(self.levels):
            size *= count
            if a // size == b // size:
                return index
        raise AssertionError("the outermost level joins all ranks")


@dataclass(frozen=True, slots=True)
class LinkMatrix:
    """Holds a bandwidth and a latency for every pair of devices."""

    rows: tuple[tuple[float, ...], ...]
    """Row a, column b: bytes per second from rank a to rank b. The diagonal is not used."""
    latency_rows: tuple[tuple[float, ...], ...] = ()
    """Row a, column b: seconds from rank a to rank b; empty means zeros. The diagonal is not used."""
    cost_rows: tuple[tuple[MessageCosts, ...], ...] = ()
    """Row a, column b: what a message from rank a to rank b costs each of the two; empty means nothing."""

    def __post_init__(self) -> None:
        if not self.rows:
            raise PlanError("matrix: expected one row or more, found none: give one row per device")
        _check_square("matrix", self.rows, len(self.rows), _BANDWIDTH)
        if not self.latency_rows:
            object.__setattr__(self, "latency_rows", ((0.0,) * len(self.rows),) * len(self.rows))
        _check_square("latency_seconds", self.latency_rows, len(self.rows), _LATENCY)
        if not self.cost_rows:
            object.__setattr__(self, "cost_rows", ((FREE,) * len(self.rows),) * len(self.rows))
        if {len(self.rows)} != {len(self.cost_rows), *map(len, self.cost_rows)}:
            raise PlanError(
                f"message_costs: expected {len(self.rows)} rows of as many, found others: give one per link"
            )
        for a, row in enumerate(self.cost_rows):
            _check_costs(f"message_costs[{a}]", row)

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

    def costs(self, a: int, b: int) -> MessageCosts:
        """What a message from rank `a` to rank `b` costs each of them."""
        return self.cost_rows[a][b]


Links: TypeAlias = LinkLevels | LinkMatrix

_RULES = {
    "links": instance(
        (LinkLevels, LinkMatrix),
        "LinkLevels or a LinkMatrix",
        "build the cluster with Cluster.uniform, Cluster.hierarchical or Cluster.from_matrix",
    ),
    "memory_bytes": number(above=0)
    .but("give the memory of one device in bytes, or leave it out if it is no limit")
    .optional,
    "action_seconds": number(0).but("give the seconds that every action takes beyond its layers' (`penstock probe`)"),
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices and the links between them."""

    links: Links
    memory_bytes: float | None = None
    """The memory of each device; None means no limit."""
    action_seconds: float = 0.0
    """How long every forward, backward, part of a backward and update takes beyond the seconds of a profile."""

    def __post_init__(self) -> None:
        check_fields(self, _RULES, PlanError)

    @classmethod
    def uniform(
        cls, devices: int, bandwidth: float, memory_bytes: float | None = None, latency_seconds: float = 0.0
    ) -> "Cluster":
        """A cluster whose devices all have the same bandwidth and latency between them. Raises `PlanError`."""
        return cls.hierarchical([(devices, bandwidth)], memory_bytes, latency_seconds)

    @classmethod
    def hierarchical(
        cls,
        levels: Iterable[tuple[int, float]],
        memory_bytes: float | None = None,
        latency_seconds: float | Sequence[float] = 0.0,
    ) -> "Cluster":
        """A cluster of `levels` of (count, bytes per second), innermost first: [(4, 12e9), (4, 1.25e9)].

        `latency_seconds`: one number per level, or one for all levels. Raises `PlanError`.
        """
        pairs = entries("levels", levels, PlanError)
        if is_number(latency_seconds):
            latencies: tuple[Any, ...] = (latency_seconds,) * len(pairs)
        else:
            latencies = entries("latency_seconds", latency_seconds, PlanError)
        return cls(LinkLevels(pairs, latencies), memory_bytes)

    @classmethod
    def from_matrix(
        cls,
        bandwidth: Sequence[Sequence[float]],
        memory_bytes: float | None = None,
        latency_seconds: float | Sequence[Sequence[float]] = 0.0,
    ) -> "Cluster":
        """A cluster with a matrix: row a, column b of `bandwidth` is the bytes per second from rank a to rank b.

        `latency_seconds`: a matrix of the same shape, or one number for all links. Raises `PlanError`.
        """
        rows = _plain_rows("bandwidth", bandwidth)
        if is_number(latency_seconds):
            latencies: tuple[tuple[Any, ...], ...] = ((latency_seconds,) * len(rows),) * len(rows)
        else:
            latencies = _plain_rows("latency_seconds", latency_seconds)
        return cls(LinkMatrix(rows, latencies), memory_bytes)

    def with_costs(
        self, *, action_seconds: float = 0.0, message_seconds: float = 0.0, message_seconds_per_byte: float = 0.0
    ) -> "Cluster":
        """This cluster, where every action takes so much longer, and a message from any rank to another takes so much
        processor time at both ends. Raises `PlanError`.
        """
        costs, links = MessageCosts(message_seconds, message_seconds_per_byte), self.links
        match links:
            case LinkLevels(levels=levels):
                links = replace(links, message_costs=(costs,) * len(levels))
            case LinkMatrix(rows=rows):
                links = replace(links, cost_rows=((costs,) * len(rows),) * len(rows))
            case _:
                assert_never(links)
        return replace(self, links=links, action_seconds=action_seconds)

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

    @property
    def has_message_costs(self) -> bool:
        """Whether messages take time of the ranks."""
        match self.links:
            case LinkLevels(message_costs=costs):
                return any(cost != FREE for cost in costs)
            case LinkMatrix(cost_rows=rows):
                return any(cost != FREE for row in rows for cost in row)
            case _:
                assert_never(self.links)

    def message_costs(self, a: int, b: int) -> MessageCosts:
        """What a message from rank `a` to rank `b` costs each of the two; nothing from a rank to itself.

        Raises `PlanError`.
        """
        self._check_ranks(a, b)
        return FREE if a == b else self.links.costs(a, b)

    def transfer_seconds(self, size_bytes: float, a: int, b: int) -> float:
        """Seconds that a message of `size_bytes` takes from rank `a` to rank `b`, 0 from a rank to itself.

        Raises `PlanError`.
        """
        size_bytes = number(0, infinite=True).check("size_bytes", size_bytes, PlanError)
        return self.latency(a, b) + size_bytes / self.bandwidth(a, b)

    def save(self, path: str | Path) -> None:
        """Writes YAML. `PlanError` if the file cannot be written."""
        lines = [f"format: {_FORMAT}"]
        if self.memory_bytes is not None:
            lines.append(f"memory_bytes: {number_text(self.memory_bytes)}")
        if self.action_seconds:
            lines.append(f"action_seconds: {number_text(self.action_seconds)}")
        # A file that was cut off after a level would be a smaller cluster.
        lines.append(f"devices: {self.devices}")
        match self.links:
            case LinkLevels(levels, latencies, costs):
                lines.append("levels: # innermost first")
                for (count, speed), latency, cost in zip(levels, latencies, costs, strict=True):
                    more = f", latency_seconds: {number_text(latency)}" if latency else ""
                    more += cost.text()
                    lines.append(f"- {{count: {count}, bytes_per_second: {number_text(speed)}{more}}}")
            case LinkMatrix(rows, latencies, cost_rows):
                lines.append("matrix: # row a, column b: bytes per second from rank a to rank b")
                lines += [f"- [{', '.join(number_text(value) for value in row)}]" for row in rows]
                if any(map(any, latencies)):
                    lines.append("latency_seconds: # row a, column b: of the smallest message from rank a to rank b")
                    lines += [f"- [{', '.join(number_text(value) for value in row)}]" for row in latencies]
                lines += write_costs(cost_rows)
            case _:
                assert_never(self.links)
        write_text(path, "\n".join(lines) + "\n", PlanError)

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """Reads what `save` wrote, perhaps edited. `PlanError` names the file, the field and the fix."""
        place = read_yaml(path, PlanError)
        place.check_format(_FORMAT)
        known = ("memory_bytes", "action_seconds", "devices", "levels", "matrix", "latency_seconds", *COST_KEYS)
        places = place.mapping(("format",), known)
        made = cls._read(path, place, places)
        if "devices" in places and places["devices"].integer() != made.devices:
            places["devices"].fail(
                f"{made.devices}, the devices of the links in this file",
                "if the file was cut off, save it again; if you have changed the links, correct this number, or remove "
                "the line",
            )
        return made

    @classmethod
    def _read(cls, path: str | Path, place: YamlNode, places: Mapping[str, YamlNode]) -> "Cluster":
        if ("levels" in places) == ("matrix" in places):
            found = "both" if "levels" in places else "neither"
            raise PlanError(f"{path}: expected either `levels` or `matrix`, found {found}: describe the links once")
        memory = places["memory_bytes"].number() if "memory_bytes" in places else None
        action = places["action_seconds"].number() if "action_seconds" in places else 0.0
        if "levels" in places:
            for key in {"latency_seconds", *COST_KEYS} & places.keys():
                places[key].fail("no such key beside `levels`", f"write {key} inside each level")
            read = [_read_level(level) for level in places["levels"].items()]
            levels, latencies, costs = zip(*read, strict=True) if read else ((), (), ())
            return place.build(lambda: cls(LinkLevels(levels, latencies, costs), memory, action))
        rows = _read_rows(places["matrix"])
        cost_rows = read_costs(place, places, len(rows))
        latency_rows: tuple[tuple[float, ...], ...] = ()
        if "latency_seconds" in places:
            latency = places["latency_seconds"]
            one = () if isinstance(latency.value, list) else (latency.number(),) * len(rows)
            latency_rows = (one,) * len(rows) if one else _read_rows(latency)
        return place.build(lambda: cls(LinkMatrix(rows, latency_rows, cost_rows), memory, action))

    def _check_ranks(self, *ranks: int) -> None:
        for rank in ranks:
            if not 0 <= integer().check("rank", rank, PlanError) < self.devices:
                raise PlanError(
                    f"rank {rank} is not in this cluster: expected 0 to {self.devices - 1}. "
                    "Use fewer ranks or describe more devices"
                )


def _read_level(place: YamlNode) -> tuple[tuple[int, float], float, MessageCosts]:
    places = place.mapping(("count", "bytes_per_second"), ("latency_seconds", *COST_KEYS))
    latency = places["latency_seconds"].number() if "latency_seconds" in places else 0.0
    return (places["count"].integer(), places["bytes_per_second"].number()), latency, read_cost(place, places)


def _read_rows(place: YamlNode) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(value.number() for value in row.items()) for row in place.items())


def _plain_rows(where: str, matrix: object) -> tuple[tuple[float, ...], ...]:
    """The numbers of `matrix`, rows of rows or an array, as numbers of Python."""
    entry = number(infinite=True)
    rows = enumerate(entries(where, matrix, PlanError))
    return tuple(
        tuple(entry.check(f"{where}[{a}]", value, PlanError) for value in entries(f"{where}[{a}]", row, PlanError))
        for a, row in rows
    )


def _check_level(index: int, level: object) -> tuple[int, float]:
    found = entries(f"levels[{index}]", level, PlanError)
    if len(found) != 2:
        raise PlanError(
            f"levels[{index}]: expected (count, bytes per second), found {text_of(level)}: give both, and nothing else"
        )
    count = integer(1).but("give the number of components that this level joins")
    return (
        count.check(f"levels[{index}].count", found[0], PlanError),
        _BANDWIDTH.check(f"levels[{index}].bytes_per_second", found[1], PlanError),
    )


def _check_costs(where: str, costs: Sequence[object]) -> tuple[MessageCosts, ...]:
    rule = instance(
        MessageCosts, "a penstock.MessageCosts", "build it: MessageCosts(seconds=..., seconds_per_byte=...)"
    )
    return tuple(rule.check(f"{where}[{index}].message_costs", one, PlanError) for index, one in enumerate(costs))


def _check_square(where: str, rows: Sequence[Sequence[float]], size: int, rule: Rule[float]) -> None:
    """Raises `PlanError` unless `rows` is square with `size` rows, and all numbers off the diagonal follow `rule`."""
    if len(rows) != size:
        raise PlanError(f"{where}: expected {size} rows (one per device), found {len(rows)}: give a square matrix")
    for a, row in enumerate(rows):
        if len(row) != size:
            raise PlanError(
                f"{where}[{a}]: expected {size} numbers (one per device), found {len(row)}: give a square matrix"
            )
        for b, value in enumerate(row):
            if a != b:
                rule.check(f"{where}[{a}][{b}]", value, PlanError)
