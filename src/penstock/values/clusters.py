"""The machines: how many devices, how much memory each, and how fast the links between them.

Links are either a hierarchy (4 servers of 4 devices each; [PipeDream 2019, figure 7]) or a measured matrix. Bandwidths
are bytes per second, and latencies are the seconds that the smallest message takes, both in one direction: a message of
n bytes takes latency + n / bandwidth seconds. Besides, messages and actions take time of the ranks themselves, which
cannot compute meanwhile: see `MessageCosts` and `Cluster.action_seconds`. Devices are equal, unless `kinds` says of
what kind each of them is.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, assert_never

from penstock.arguments import Entries, FieldRules, check_fields, entries, instance, integer, is_number, number, text_of
from penstock.errors import PlanError
from penstock.values.device_kinds import DeviceKind, read_kinds, write_kinds
from penstock.values.documents import YamlNode, number_text, read_known, read_yaml, write_text
from penstock.values.link_tables import (
    COST_KEYS,
    FREE,
    LinkLevels,
    LinkMatrix,
    Links,
    MessageCosts,
    read_cost,
    read_costs,
    write_costs,
    write_rows,
)
from penstock.values.quantities import MOST

_FORMAT = "penstock-cluster/1"
_NUMBERS = ("memory_bytes", "action_seconds", "step_seconds", "host_bandwidth", "host_bytes")

_RULES: FieldRules = {
    "links": instance(
        (LinkLevels, LinkMatrix),
        "LinkLevels or a LinkMatrix",
        "build the cluster with Cluster.uniform, Cluster.hierarchical or Cluster.from_matrix",
    ),
    "memory_bytes": number(above=0, most=MOST)
    .but("give the memory of one device in bytes, or leave it out if it is no limit")
    .optional,
    "host_bandwidth": number(above=0, infinite=True)
    .but("give the bytes per second between a device and its host")
    .optional,
    "host_bytes": number(0, infinite=True).but("give the bytes of the host for what a rank offloads"),
    "action_seconds": number(0, most=MOST).but("give the seconds of an action beside its layers (`penstock probe`)"),
    "step_seconds": number(0, most=MOST).but("give the seconds of a step beside its actions (`penstock probe`)"),
    "kinds": Entries(instance(DeviceKind, "a penstock.DeviceKind", "build it: penstock.DeviceKind(name, speed=0.5)")),
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices and the links between them."""

    links: Links
    memory_bytes: float | None = None
    """The memory of each device whose kind does not give its own; None means no limit."""
    action_seconds: float = 0.0
    """How long every forward, backward, part of a backward and update takes beyond the seconds of a profile."""
    kinds: tuple[DeviceKind, ...] = ()
    """The kind of every device, by rank; empty if all are as the one that was profiled."""
    host_bandwidth: float | None = None
    """The bytes per second from each device to the memory of its host, and as many back at the same time, for what a
    schedule offloads. On a CPU: to a directory. None: it is not known."""
    host_bytes: float = math.inf
    """The most bytes of the host that each rank may take for what it offloads."""
    step_seconds: float = 0.0
    """How long a step takes before its first and after its last action: the training loop, and data it waits for."""

    def __post_init__(self) -> None:
        check_fields(self, _RULES, PlanError)
        if self.kinds and len(self.kinds) != self.devices:
            raise PlanError(
                f"kinds: expected {self.devices} (one per device), found {len(self.kinds)}: give the kind of every "
                "device, in the order of their ranks"
            )

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
        self,
        *,
        action_seconds: float = 0.0,
        message_seconds: float = 0.0,
        message_seconds_per_byte: float = 0.0,
        message_blocking: float = 0.0,
    ) -> "Cluster":
        """This cluster, where every action takes so much longer, and a message from any rank to another takes so much
        time of both ends (`MessageCosts`). Raises `PlanError`.
        """
        costs, links = MessageCosts(message_seconds, message_seconds_per_byte, message_blocking), self.links
        match links:
            case LinkLevels(levels=levels):
                links = replace(links, message_costs=(costs,) * len(levels))
            case LinkMatrix(rows=rows):
                links = replace(links, cost_rows=((costs,) * len(rows),) * len(rows))
            case _:
                assert_never(links)
        return replace(self, links=links, action_seconds=action_seconds)

    def with_kinds(self, kinds: DeviceKind | Iterable[DeviceKind]) -> "Cluster":
        """This cluster with the kind of every device, or with one kind for all. Raises `PlanError`."""
        every = (kinds,) * self.devices if isinstance(kinds, DeviceKind) else entries("kinds", kinds, PlanError)
        return replace(self, kinds=every)

    def with_memory(self, memory_bytes: float | None) -> "Cluster":
        """This cluster with the same memory on every device; None: no limit."""
        kinds = tuple(replace(kind, memory_bytes=None) for kind in self.kinds)
        return replace(self, memory_bytes=memory_bytes, kinds=kinds)

    def pick(self, ranks: Sequence[int]) -> "Cluster":
        """The cluster of the devices `ranks` alone, in this order: its rank i is the device ``ranks[i]`` of this one.

        Links become a matrix, unless the devices follow each other and fill whole components. Raises `PlanError`.
        """
        self._check_ranks(*ranks)
        if len(set(ranks)) < len(ranks) or not ranks:
            raise PlanError(f"ranks: expected devices, each once, found {text_of(ranks)}: name each device once")
        kinds = tuple(self.kinds[rank] for rank in ranks) if self.kinds else ()
        return replace(self, links=_pick_links(self, tuple(ranks)), kinds=kinds)

    @property
    def is_equal(self) -> bool:
        """Whether all devices run every plan alike."""
        return len({self.class_of(rank) for rank in range(len(self.kinds))}) <= 1

    def kind_of(self, rank: int) -> DeviceKind:
        """The kind of the device `rank`. Raises `PlanError`."""
        self._check_ranks(rank)
        return self.kinds[rank] if self.kinds else DeviceKind()

    def class_of(self, rank: int) -> DeviceKind:
        """The kind of the device `rank` without its price: devices of one class run every plan alike."""
        return replace(self.kind_of(rank), memory_bytes=self.memory_of(rank), price_per_hour=0.0)

    def memory_of(self, rank: int) -> float | None:
        """The memory of the device `rank`; None means no limit. Raises `PlanError`."""
        own = self.kind_of(rank).memory_bytes
        return self.memory_bytes if own is None else own

    @property
    def least_memory_bytes(self) -> float | None:
        """The memory of the device that has least; None if no device has a limit."""
        if not self.kinds:
            return self.memory_bytes
        return min((size for rank in range(self.devices) if (size := self.memory_of(rank)) is not None), default=None)

    def price_per_hour(self, ranks: Iterable[int] | None = None) -> float:
        """The price of the devices `ranks` (default: of all) for an hour; 0 if it is not known."""
        every = range(self.devices) if ranks is None else ranks
        return math.fsum(self.kind_of(rank).price_per_hour for rank in every)

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
        return any(cost != FREE for cost in self.links.every_cost)

    @property
    def blocks(self) -> bool:
        """Whether a message on some link keeps its ranks from computing."""
        return any(cost.blocking for cost in self.links.every_cost)

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
        for key in ("action_seconds", "step_seconds"):
            lines += [f"{key}: {number_text(value)}"] if (value := getattr(self, key)) else []
        if self.host_bandwidth is not None:
            lines.append(f"host_bandwidth: {number_text(self.host_bandwidth)}")
        if self.host_bytes < math.inf:
            lines.append(f"host_bytes: {number_text(self.host_bytes)}")
        # A file that was cut off after a level would be a smaller cluster.
        lines.append(f"devices: {self.devices}")
        lines += write_kinds(self.kinds) if self.kinds else []
        match self.links:
            case LinkLevels(levels, latencies, costs):
                lines.append("levels: # innermost first")
                for (count, speed), latency, cost in zip(levels, latencies, costs, strict=True):
                    more = f", latency_seconds: {number_text(latency)}" if latency else ""
                    more += cost.text()
                    lines.append(f"- {{count: {count}, bytes_per_second: {number_text(speed)}{more}}}")
            case LinkMatrix(rows, latencies, cost_rows):
                lines += write_rows("matrix", "bytes per second from rank a to rank b", rows)
                if any(map(any, latencies)):
                    lines += write_rows("latency_seconds", "of the smallest message from rank a to rank b", latencies)
                lines += write_costs(cost_rows)
            case _:
                assert_never(self.links)
        write_text(path, "\n".join(lines) + "\n", PlanError)

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """Reads what `save` wrote, perhaps edited. `PlanError` names the file, the field and the fix."""
        place = read_yaml(path, PlanError)
        place.check_format(_FORMAT)
        known = (*_NUMBERS, "devices", "kinds", "levels", "matrix", "latency_seconds", *COST_KEYS)
        places = place.mapping(("format",), known)
        made = _read_cluster(path, place, places)
        if "kinds" in places:
            kinds = read_kinds(places["kinds"])
            made = place.build(lambda: made.with_kinds(kinds))
        if "devices" in places and places["devices"].integer() != made.devices:
            places["devices"].fail(
                f"{made.devices}, the devices of the links in this file",
                "if the file was cut off, save it again; if you have changed the links, correct this number, or remove "
                "the line",
            )
        return made

    def _check_ranks(self, *ranks: int) -> None:
        for rank in ranks:
            if type(rank) is int and 0 <= rank < self.devices:
                continue
            if not 0 <= integer().check("rank", rank, PlanError) < self.devices:
                raise PlanError(
                    f"rank {rank} is not in this cluster: expected 0 to {self.devices - 1}. "
                    "Use fewer ranks or describe more devices"
                )


def _read_cluster(path: str | Path, place: YamlNode, places: Mapping[str, YamlNode]) -> Cluster:
    if ("levels" in places) == ("matrix" in places):
        found = "both" if "levels" in places else "neither"
        raise PlanError(f"{path}: expected either `levels` or `matrix`, found {found}: describe the links once")
    known = read_known(places, dict.fromkeys(_NUMBERS, YamlNode.number))
    if "levels" in places:
        for key in {"latency_seconds", *COST_KEYS} & places.keys():
            places[key].fail("no such key beside `levels`", f"write {key} inside each level")
        read = [_read_level(level) for level in places["levels"].items()]
        levels, latencies, costs = zip(*read, strict=True) if read else ((), (), ())
        return place.build(lambda: Cluster(LinkLevels(levels, latencies, costs), **known))
    rows = _read_rows(places["matrix"])
    cost_rows = read_costs(place, places, len(rows))
    latency_rows: tuple[tuple[float, ...], ...] = ()
    if "latency_seconds" in places:
        latency = places["latency_seconds"]
        one = () if isinstance(latency.value, list) else (latency.number(),) * len(rows)
        latency_rows = (one,) * len(rows) if one else _read_rows(latency)
    return place.build(lambda: Cluster(LinkMatrix(rows, latency_rows, cost_rows), **known))


def _pick_links(cluster: Cluster, ranks: tuple[int, ...]) -> Links:
    match cluster.links:
        case LinkLevels(levels, latencies, costs) if ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
            size = 1
            for depth, (count, bandwidth) in enumerate(levels):
                outer, rest = divmod(len(ranks), size)
                if not rest and ranks[0] % size == 0 and ranks[0] % (size * count) + len(ranks) <= size * count:
                    return LinkLevels((*levels[:depth], (outer, bandwidth)), latencies[: depth + 1], costs[: depth + 1])
                size *= count
        case _:
            pass
    rows = tuple(tuple(cluster.bandwidth(a, b) for b in ranks) for a in ranks)
    delays = tuple(tuple(cluster.latency(a, b) for b in ranks) for a in ranks)
    return LinkMatrix(rows, delays, tuple(tuple(cluster.message_costs(a, b) for b in ranks) for a in ranks))


def _read_level(place: YamlNode) -> tuple[tuple[int, float], float, MessageCosts]:
    places = place.mapping(("count", "bytes_per_second"), ("latency_seconds", *COST_KEYS))
    latency = places["latency_seconds"].number() if "latency_seconds" in places else 0.0
    return (places["count"].integer(), places["bytes_per_second"].number()), latency, read_cost(place, places)


def _read_rows(place: YamlNode) -> tuple[tuple[float, ...], ...]:
    return tuple(row.numbers() for row in place.items())


def _plain_rows(where: str, matrix: object) -> tuple[tuple[float, ...], ...]:
    """The numbers of `matrix`, rows of rows or an array, as numbers of Python."""
    rule = Entries(number(infinite=True))
    rows = enumerate(entries(where, matrix, PlanError))
    return tuple(rule.check(f"{where}[{a}]", row, PlanError) for a, row in rows)


CLUSTER = instance(Cluster, "a penstock.Cluster", "describe it with Cluster.uniform, or read a file with Cluster.load")
"""The rule of an argument that is a cluster."""
