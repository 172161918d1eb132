"""The fastest pipelines on devices that are not equal: which devices, in which order, with which replicas.

PipeDream's recurrence counts workers, because its workers are equal. Here it counts the devices of each *class*: those
of one kind whose links are the same too, so that any of them may stand for another. With F the time of the slowest
stage or link of the best pipeline for the layers from i on, c the devices of each class that it uses, and g those of
its first stage:

    F(i, c, g) = min over j of max( T(i -> j, g), min over g' of max( a_j / B(g, g'), F(j, c - g, g') ) )

T is the time of a stage on the devices g: that of the slowest of them, as replicas that take turns wait for each other,
over their number, or the all-reduce. So devices may be left out, and any order of them is possible. The result is exact
for the links that it is given. They come in two ways, and both are tried, where there are few enough classes:

  1. Every server has classes of its own, and a cut takes the slowest link between the classes on its two sides. A stage
     then stays within a class; with few classes it may also mix them.
  2. All links count as the slowest one of the machine. There are fewer classes, and a stage may mix them.

The time grows with the product of the classes' sizes; [SPP 2022] has an order of the devices instead, and its planner
takes more of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import inf, prod

import numpy as np

from penstock.errors import PlanError
from penstock.planning.requests import Room
from penstock.planning.spp.device_orders import link_speeds
from penstock.planning.stage_costs import AllReduce, ChainCosts, Matrix, replicated_seconds
from penstock.values.chain_cuts import cut_evenly
from penstock.values.clusters import Cluster
from penstock.values.link_tables import LinkLevels, LinkMatrix
from penstock.values.plan_stages import Stage

_MOST_WORK = 1e9
"""Elements that the search for one plan may examine: about a second."""

_CALL = 3e4
"""The time of a step of the search beside its elements, in elements."""

_Group = tuple[int, ...]
"""How many devices of each class a stage takes."""


def fastest_unequal(
    costs: ChainCosts, cluster: Cluster, *, straight: bool, allreduce: AllReduce, room: Room | None = None
) -> dict[tuple[int, ...], tuple[float, tuple[Stage, ...]]]:
    """The best pipelines, each with the seconds of its slowest stage or link, by the devices that they use.

    The stages have the numbers of devices in `cluster` as ranks. `straight`: every stage is on one device. `room`: what
    limits the memory; its size is replaced by that of each device. For every number of devices only the fastest
    pipeline is in the result, if it is faster than those on fewer devices or uses all; none if nothing fits. Raises
    `PlanError` if there are too many different devices.
    """
    found: dict[tuple[int, ...], tuple[float, tuple[Stage, ...]]] = {}
    solved = False
    for machine in _machines(cluster, costs, allreduce):
        for mixed in (False,) if straight else (True, False):
            if mixed and prod(size + 1 for size in machine.sizes) > _MOST_WORK:
                continue
            groups = machine.groups(straight=straight, mixed=mixed)
            if machine.work(groups, costs.layers, room) > _MOST_WORK:
                continue
            solved = True
            for seconds, stages in _solve(machine, groups, room):
                used = tuple(sorted(rank for stage in stages for rank in stage.ranks))
                if seconds < found.get(used, (inf,))[0]:
                    found[used] = seconds, stages
            break
    if not solved:
        raise PlanError(
            f"planner pipedream: {cluster.devices} devices of {len(_classes(cluster, by_links=False))} classes are too "
            "many different ones: expected few kinds of devices. Use planner spp, or give devices that differ little "
            "the same kind"
        )
    least = inf
    best = {}
    for used, (seconds, stages) in sorted(found.items(), key=lambda item: (len(item[0]), item[1][0])):
        if seconds < least * (1 - 1e-9) or (len(used) == cluster.devices and used not in best):
            best[used] = seconds, stages
            least = min(least, seconds)
    return best


@dataclass(frozen=True, slots=True, eq=False)
class _Machine:
    """Classes of devices, and the links between and within them."""

    costs: ChainCosts
    allreduce: AllReduce
    classes: tuple[tuple[int, ...], ...]
    """The devices of every class."""
    seconds: tuple[Matrix, ...]
    """By class, (N+1, N+1)."""
    memory_bytes: tuple[float, ...]
    """By class; infinite without a limit."""
    speeds: Matrix
    """(classes, classes): bytes per second of the slowest link between two devices of these classes; not a number where
    there are no two."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.classes))

    @property
    def is_flat(self) -> bool:
        """Whether all links are equal, so that it does not matter which classes are next to each other."""
        return len(np.unique(self.speeds[~np.isnan(self.speeds)])) <= 1

    def groups(self, *, straight: bool, mixed: bool) -> list[_Group]:
        """What a stage may take: one device, several of a class, or several of any class."""
        if mixed:
            return [group for group in product(*(range(size + 1) for size in self.sizes)) if any(group)]
        none = (0,) * len(self.sizes)
        return [
            (*none[:index], count, *none[index + 1 :])
            for index, size in enumerate(self.sizes)
            for count in range(1, 2 if straight else size + 1)
        ]

    def work(self, groups: Sequence[_Group], layers: int, room: Room | None) -> float:
        """About how many elements `_solve` examines."""
        states = prod(size + 1 for size in self.sizes)
        if states > 1e6 or len(groups) > 1e5:
            return inf
        pairs = sum(prod(size + 1 - count for size, count in zip(self.sizes, group, strict=True)) for group in groups)
        return pairs * (2.0 * (layers + 1) ** 2 + _CALL) * (sum(self.sizes) if room is not None else 1)

    def kinds_of(self, group: _Group) -> tuple[int, ...]:
        """The classes in `group`; with equal links all groups count as alike."""
        return () if self.is_flat else tuple(index for index, count in enumerate(group) if count)

    def link(self, here: tuple[int, ...], there: tuple[int, ...]) -> float:
        """The slowest link between two groups of these classes."""
        if self.is_flat:
            return float(np.nanmin(self.speeds))
        return float(np.nanmin(self.speeds[np.ix_(here, there)]))

    def stage_seconds(self, group: _Group) -> Matrix:
        """(N+1, N+1): ``T`` on the devices of `group`."""
        held = [index for index, count in enumerate(group) if count]
        slowest: Matrix = np.maximum.reduce([self.seconds[index] for index in held])
        if sum(group) == 1:
            return slowest
        speeds = [self.speeds[a, b] for a in held for b in held if a != b or group[a] > 1]
        return replicated_seconds(slowest, self.costs.parameter_bytes, sum(group), float(min(speeds)), self.allreduce)

    def room_of(self, group: _Group) -> float:
        """The memory of the smallest device in `group`."""
        return min(self.memory_bytes[index] for index, count in enumerate(group) if count)


def _machines(cluster: Cluster, costs: ChainCosts, allreduce: AllReduce) -> Iterator[_Machine]:
    """The machine with its links, and the one with equal links if that is another."""
    speeds = link_speeds(cluster)
    flat = len(np.unique(speeds[~np.eye(len(speeds), dtype=bool)])) <= 1
    for by_links in (False,) if flat else (True, False):
        classes = _classes(cluster, by_links=by_links)
        between = np.full((len(classes), len(classes)), cluster.slowest, dtype=np.float64)
        if by_links:
            for a, one in enumerate(classes):
                for b, other in enumerate(classes):
                    alone = a == b and len(one) == 1
                    between[a, b] = np.nan if alone else speeds[np.ix_(one, other)].min()
        sizes = [cluster.memory_of(members[0]) for members in classes]
        yield _Machine(
            costs,
            allreduce,
            classes,
            seconds=tuple(costs.seconds_on(members[:1]) for members in classes),
            memory_bytes=tuple(inf if size is None else size for size in sizes),
            speeds=between,
        )


def _classes(cluster: Cluster, *, by_links: bool) -> tuple[tuple[int, ...], ...]:
    """The devices of each class; with `by_links` only those of one server, or with the same links, are of one."""
    classes: dict[object, list[int]] = {}
    for rank in range(cluster.devices):
        place: object = None
        if by_links:
            match cluster.links:
                case LinkLevels(levels):
                    place = rank // next((count for count, _ in levels if count > 1), 1)
                case LinkMatrix():
                    place = rank
        classes.setdefault((cluster.class_of(rank), place), []).append(rank)
    return tuple(map(tuple, classes.values()))


def _solve(machine: _Machine, groups: Sequence[_Group], room: Room | None) -> Iterator[tuple[float, tuple[Stage, ...]]]:
    """(Slowest seconds, stages) of the best pipeline on every combination of devices that fits."""
    if room is None:
        yield from _Recurrence(machine, groups, None, sum(machine.sizes)).pipelines()
        return
    for workers in range(1, sum(machine.sizes) + 1):
        # What a stage keeps in flight depends on the number of all workers.
        recurrence = _Recurrence(machine, groups, room, workers)
        yield from (found for found in recurrence.pipelines() if sum(len(stage.ranks) for stage in found[1]) == workers)


class _Recurrence:
    """Computes F for all combinations of devices, from the last stage to the first."""

    def __init__(self, machine: _Machine, groups: Sequence[_Group], room: Room | None, workers: int) -> None:
        self._machine = machine
        self._room = room
        self._workers = workers
        self._seconds: dict[tuple[_Group, int], Matrix] = {}
        self._best: dict[_Group, dict[tuple[int, ...], Matrix]] = {}
        """By the devices that are used, and the classes of the first stage: (N+1,), by the first layer."""
        self._after: dict[tuple[tuple[int, ...], _Group], Matrix] = {}
        self._exchanges: dict[tuple[tuple[int, ...], tuple[int, ...]], Matrix] = {}
        self._groups = groups
        states = sorted(product(*(range(size + 1) for size in machine.sizes)), key=sum)
        for state in states[1:]:
            if sum(state) <= workers:
                self._extend(state)

    def pipelines(self) -> Iterator[tuple[float, tuple[Stage, ...]]]:
        """The best pipeline of all layers on every combination of devices."""
        for state, tables in self._best.items():
            limit = min((float(table[0]) for table in tables.values()), default=inf)
            if limit < inf:
                yield limit, self._stages(state, limit)

    def _extend(self, state: _Group) -> None:
        """Computes F of `state`, all of whose parts are known."""
        layers = self._machine.costs.layers
        tables: dict[tuple[int, ...], Matrix] = {}
        for group in self._fitting(state):
            rest = tuple(have - take for have, take in zip(state, group, strict=True))
            seconds = self._stage(group, sum(rest))
            kind = self._machine.kinds_of(group)
            if not any(rest):
                own = seconds[:, -1]
            else:
                behind = self._behind(kind, rest)
                own = np.maximum(seconds[:, 1:layers], behind[None, 1:layers]).min(axis=1, initial=inf)
            tables[kind] = np.minimum(tables[kind], own) if kind in tables else own
        self._best[state] = tables

    def _fitting(self, state: _Group) -> Iterator[_Group]:
        for group in self._groups:
            if all(take <= have for take, have in zip(group, state, strict=True)):
                yield group

    def _behind(self, kind: tuple[int, ...], rest: _Group) -> Matrix:
        """(N+1,): the slowest of what is behind a stage of these classes, by where it stops."""
        if (kind, rest) not in self._after:
            after = [np.maximum(table, self._exchange(kind, other)) for other, table in self._best[rest].items()]
            none = np.full(self._machine.costs.layers + 1, inf)
            self._after[kind, rest] = np.minimum.reduce([none, *after])
        return self._after[kind, rest]

    def _exchange(self, here: tuple[int, ...], there: tuple[int, ...]) -> Matrix:
        """(N+1,): the seconds of every cut between two stages of these classes."""
        if (here, there) not in self._exchanges:
            self._exchanges[here, there] = self._machine.costs.exchange_seconds(self._machine.link(here, there))
        return self._exchanges[here, there]

    def _stage(self, group: _Group, behind: int) -> Matrix:
        """(N+1, N+1): the seconds of a stage on `group` with `behind` workers behind it, where it fits."""
        key = group, behind if self._room is not None else 0
        if key not in self._seconds:
            seconds = self._machine.stage_seconds(group)
            size = self._machine.room_of(group)
            if self._room is not None and size < inf:
                room = replace(self._room, size_bytes=size, workers=self._workers)
                count = sum(group)
                fits = room.fitting(self._machine.costs, room.counts(count, behind + count), replicas=count)
                seconds = np.where(fits, seconds, inf)
            self._seconds[key] = seconds
        return self._seconds[key]

    def _stages(self, state: _Group, limit: float) -> tuple[Stage, ...]:
        """The stages of a pipeline on `state` with nothing slower than `limit`, with the most balanced cuts."""
        chosen: list[_Group] = []
        start, kind, left = 0, None, state
        while any(left):
            group, start = self._first(left, start, kind, limit)
            chosen.append(group)
            kind = self._machine.kinds_of(group)
            left = tuple(have - take for have, take in zip(left, group, strict=True))
        behind = [sum(map(sum, chosen[index + 1 :])) for index in range(len(chosen))]
        kinds = [self._machine.kinds_of(group) for group in chosen]
        exchange = [self._exchange(here, there) for here, there in pairwise(kinds)]
        cuts = cut_evenly(lambda stage, starts: self._stage(chosen[stage], behind[stage])[starts], exchange, limit)
        free = [iter(members) for members in self._machine.classes]
        return tuple(
            Stage(i, j, tuple(next(free[index]) for index, count in enumerate(group) for _ in range(count)))
            for group, i, j in zip(chosen, cuts[:-1], cuts[1:], strict=True)
        )

    def _first(self, state: _Group, start: int, kind: tuple[int, ...] | None, limit: float) -> tuple[_Group, int]:
        """The first stage from the layer `start` on, and where it stops, so that nothing is slower than `limit`.

        `kind`: the classes of the stage before it. Of several it takes the one with the fewest devices.
        """
        machine, layers = self._machine, self._machine.costs.layers
        sent = 0.0
        for group in sorted(self._fitting(state), key=sum):
            own = machine.kinds_of(group)
            if kind is not None:
                sent = float(self._exchange(kind, own)[start])
            rest = tuple(have - take for have, take in zip(state, group, strict=True))
            seconds = self._stage(group, sum(rest))[start]
            if not any(rest):
                allowed = np.where(np.arange(layers + 1) == layers, seconds, inf)
            else:
                allowed = np.maximum(seconds, self._behind(own, rest))
                allowed[[0, -1]] = inf
            fitting = np.flatnonzero(allowed <= limit)
            if sent <= limit and len(fitting):
                return group, int(fitting[-1])
        raise AssertionError("F says that there is such a stage")
