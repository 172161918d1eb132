"""The links between devices: a hierarchy of levels, or a matrix of measured links, and what their messages cost.

Bandwidths are bytes per second and latencies seconds, both in one direction, as `Cluster` describes them. Beside its
time on the link a message costs the two ranks that it joins: a rank hands it over or takes it in, and copies its bytes
or lets a thread of the same core do so. It computes less meanwhile.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from penstock.arguments import Rule, check_fields, entries, instance, integer, number, text_of
from penstock.errors import PlanError
from penstock.values.documents import YamlNode, number_text
from penstock.values.quantities import LEAST, MOST

_HINT = "give what `penstock probe` measures, or leave it out"
_RULES = {
    **dict.fromkeys(("seconds", "seconds_per_byte"), number(0, most=MOST).but(_HINT)),
    "blocking": number(0, most=1).but("give 1 if its two ranks compute only after a message has left, and 0 if not"),
}
COST_KEYS = ("message_seconds", "message_seconds_per_byte", "message_blocking")
"""The keys of the fields in a file of a cluster."""


@dataclass(frozen=True, slots=True)
class MessageCosts:
    """The processor time of a message at each of its ends. Raises `PlanError` for a number that is none."""

    seconds: float = 0.0
    """Of every message: to hand it over, or to take it in."""
    seconds_per_byte: float = 0.0
    """Of each byte: copies, and what the kernel does for a connection between hosts."""
    blocking: float = 0.0
    """The share of a message's time on the link in which neither end computes: 1 where sends block, as NCCL's do in the
    stream of the computation, and 0 where all of it passes beside the computation."""

    def __post_init__(self) -> None:
        check_fields(self, _RULES, PlanError, " in the costs of a message")

    def text(self) -> str:
        """The fields that are not zero, as they stand in the line of a level."""
        fields = zip(COST_KEYS, (self.seconds, self.seconds_per_byte, self.blocking), strict=True)
        return "".join(f", {key}: {number_text(value)}" for key, value in fields if value)


FREE = MessageCosts()


def write_costs(rows: Sequence[Sequence[MessageCosts]]) -> list[str]:
    """The lines of a matrix; none if messages cost nothing."""
    lines = []
    for key, name in zip(COST_KEYS, ("seconds", "seconds_per_byte", "blocking"), strict=True):
        values = [[getattr(cost, name) for cost in row] for row in rows]
        if any(map(any, values)):
            lines += write_rows(key, "of a message from rank a to rank b, at each end", values)
    return lines


def write_rows(key: str, meaning: str, rows: Sequence[Sequence[float]]) -> list[str]:
    """The lines of a matrix of numbers."""
    return [f"{key}: # row a, column b: {meaning}", *(f"- [{', '.join(map(number_text, row))}]" for row in rows)]


def read_cost(place: YamlNode, places: Mapping[str, YamlNode]) -> MessageCosts:
    """The costs in the line of a level."""
    found = [places[key].number() if key in places else 0.0 for key in COST_KEYS]
    return place.build(lambda: MessageCosts(*found))


def read_costs(place: YamlNode, places: Mapping[str, YamlNode], size: int) -> tuple[tuple[MessageCosts, ...], ...]:
    """The costs beside a matrix of `size` rows; empty if the file has none. One number stands for all links."""
    found = []
    for key in COST_KEYS:
        if key not in places:
            found.append([[0.0] * size] * size)
        elif isinstance(places[key].value, list):
            found.append([list(row.numbers()) for row in places[key].items()])
        else:
            found.append([[places[key].number()] * size] * size)
        if {len(found[-1]), *map(len, found[-1])} != {size}:
            places[key].fail(f"{size} rows of {size} numbers", "give one number for each link, or a single one for all")
    if not places.keys() & set(COST_KEYS):
        return ()
    return place.build(
        lambda: tuple(
            tuple(MessageCosts(*cell) for cell in zip(*rows, strict=True)) for rows in zip(*found, strict=True)
        )
    )


_BANDWIDTH = number(above=LEAST, infinite=True).but(
    "give the measured bytes per second of the link (`penstock probe` measures it)"
)
_LATENCY = number(0, most=MOST).but(
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

    @property
    def every_cost(self) -> Iterable[MessageCosts]:
        """What messages cost on all links."""
        return self.message_costs

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

    @property
    def every_cost(self) -> Iterable[MessageCosts]:
        """What messages cost on all links."""
        return chain.from_iterable(self.cost_rows)


Links: TypeAlias = LinkLevels | LinkMatrix


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
