"""The recurrence of PipeDream's partitioner on a machine of several levels.

[PipeDream 2019, section 3.1]. With A the time of the slowest stage of the best pipeline, T that of one replicated
stage, a the bytes over a cut and B_k the bandwidth of level k:

    A^0(i->j)      =  seconds of the layers
    T^k(i->j, m)   =  max(A^(k-1)(i->j, m_(k-1)), all-reduce of the weights among m) / m
    A^k(i->j, m)   =  min of  T^k(i->j, m)                                            one stage on all m
                              max(A^k(i->s, m-m'), 2 a_s / B_k, T^k(s->j, m'))        for i < s < j, 1 <= m' < m

The first candidate is missing in the printed recurrence, which therefore cannot express data parallelism, nor a
replicated first stage; the surrounding text includes it. A level below the top is needed for all i and j; only its
values are kept, and the stages are derived again for one interval at a time, from the top down.

Memory. What a stage keeps depends on its replicas and on the workers behind it, over all levels. A component of some
level therefore has a context: how many copies of it take turns, and how many workers are behind all of them. A stage of
r components, in a component with n copies, has n r copies of its content; behind these are the workers behind the
component, and n times the components behind the stage. So A is computed for each context that can occur (a single one
without a memory limit) and is exact. Contexts in which every stage has the same counts share their tables.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, prod
from typing import TypeAlias

import numpy as np

from penstock.planning.requests import Room
from penstock.planning.stage_costs import AllReduce, ChainCosts, Matrix, replicated_seconds

_Pipeline: TypeAlias = tuple[float, tuple[tuple[int, int, int], ...]]
"""The slowest seconds of the best pipeline on one component, and its stages: (start, stop, components each)."""


@dataclass(frozen=True, slots=True)
class MachineLevel:
    """A level of the machine: `count` components, connected by links of `bandwidth` bytes per second."""

    count: int
    bandwidth: float
    allreduce: AllReduce


class Hierarchy:
    """Plans one chain on one machine of `levels`, innermost first, with stages that fit in `room`."""

    def __init__(self, costs: ChainCosts, levels: tuple[MachineLevel, ...], room: Room | None = None) -> None:
        self._costs = costs
        self._levels = levels
        self._room = room
        self._sizes = [prod(level.count for level in levels[:depth]) for depth in range(len(levels))]
        self._tables: dict[tuple[object, ...], Matrix] = {}

    def fastest(self) -> tuple[float, tuple[tuple[int, int, tuple[int, ...]], ...]]:
        """The slowest seconds of the best plan and its stages, (start, stop, ranks); infinite and none if none fits."""
        return self._unfold(len(self._levels) - 1, 1, 0, 0, self._costs.layers)

    def _unfold(
        self, depth: int, copies: int, behind: int, start: int, stop: int
    ) -> tuple[float, tuple[tuple[int, int, tuple[int, ...]], ...]]:
        """The stages of an interval on one component of level `depth`, with ranks from 0."""
        if depth < 0:
            return 0.0, ((start, stop, (0,)),)
        level, size = self._levels[depth], self._sizes[depth]
        seconds, blocks = _cheapest_pipeline(self._costs, level, self._stages(depth, copies, behind), start, stop)
        stages: list[tuple[int, int, tuple[int, ...]]] = []
        first = 0
        for *interval, replicas in blocks:
            inner = self._inside(depth, copies, behind, replicas, level.count - first)
            components = range(first, first + replicas)
            for begin, end, ranks in self._unfold(depth - 1, *inner, *interval)[1]:
                every = tuple(component * size + rank for component in components for rank in ranks)
                stages.append((begin, end, every))
            first += replicas
        return seconds, tuple(stages)

    def _table(self, depth: int, copies: int, behind: int) -> Matrix:
        """``A^k(i -> j, m_k)`` for all i and j on one component of level `depth` in this context."""
        key = depth, *self._signature(depth, copies, behind)
        if key not in self._tables:
            if depth >= 0:
                stages = self._stages(depth, copies, behind)
                self._tables[key] = _next_level(self._costs, self._levels[depth], stages)
            elif self._room is None:
                self._tables[key] = self._costs.seconds
            else:
                fits = self._room.fitting(self._costs, self._room.counts(copies, copies + behind), replicas=copies)
                self._tables[key] = np.where(fits, self._costs.seconds, np.inf)
        return self._tables[key]

    def _stages(self, depth: int, copies: int, behind: int) -> Callable[[int, int], Matrix]:
        """``T^k`` by (replicas, components from the stage on) in a component of level `depth` in this context."""
        level = self._levels[depth]
        known: dict[tuple[int, int], Matrix] = {}
        made: dict[tuple[int, int], Matrix] = {}
        """By replicas and the table below, which many contexts share."""

        def stage(replicas: int, onwards: int) -> Matrix:
            key = replicas, onwards if self._room is not None else 0
            if key not in known:
                below = self._table(depth - 1, *self._inside(depth, copies, behind, replicas, onwards))
                if (replicas, id(below)) not in made:
                    weights = self._costs.parameter_bytes
                    seconds = replicated_seconds(below, weights, replicas, level.bandwidth, level.allreduce)
                    made[replicas, id(below)] = seconds
                known[key] = made[replicas, id(below)]
            return known[key]

        return stage

    def _inside(self, depth: int, copies: int, behind: int, replicas: int, onwards: int) -> tuple[int, int]:
        """The context of each component of a stage: its copies, and the workers behind them."""
        return copies * replicas, behind + copies * (onwards - replicas) * self._sizes[depth]

    def _signature(self, depth: int, copies: int, behind: int) -> tuple[object, ...]:
        """The counts of every stage that can be in a context; nothing else matters."""
        if self._room is None:
            return ()
        return tuple(self._room.counts(count, count + later) for count, later in self._contexts(depth, copies, behind))

    def _contexts(self, depth: int, copies: int, behind: int) -> Iterator[tuple[int, int]]:
        """The contexts of single devices within this one."""
        if depth < 0:
            yield copies, behind
            return
        for onwards in range(1, self._levels[depth].count + 1):
            for replicas in range(1, onwards + 1):
                yield from self._contexts(depth - 1, *self._inside(depth, copies, behind, replicas, onwards))


def _next_level(costs: ChainCosts, level: MachineLevel, stage: Callable[[int, int], Matrix]) -> Matrix:
    """``A^k(i -> j, m_k)`` for all i and j. O(N^3 m^2), vectorized over i and j."""
    exchange = costs.exchange_seconds(level.bandwidth)
    best: list[Matrix] = []
    for workers in range(1, level.count + 1):
        onwards = level.count - workers
        table = stage(workers, onwards + workers).copy()
        for replicas in range(1, workers):
            left, right = np.maximum(best[workers - replicas - 1], exchange), stage(replicas, onwards + replicas)
            for cut in range(1, costs.layers):
                corner = table[:cut, cut + 1 :]
                np.minimum(corner, np.maximum(left[:cut, cut, None], right[cut, cut + 1 :]), out=corner)
        best.append(table)
    return best[-1]


def _cheapest_pipeline(
    costs: ChainCosts, level: MachineLevel, stage: Callable[[int, int], Matrix], start: int, stop: int
) -> _Pipeline:
    """``A^k(start -> stop, m_k)`` with its stages. O(n^2 m^2) for n layers, vectorized over the start and stop of a
    stage.

    Plans tie often. Of those with the least seconds this takes one with the fewest stages (fewer versions of weights,
    less in flight), and of these the most balanced, with the smallest sum of squared stage times.
    """
    window = slice(start, stop + 1)
    exchange = costs.exchange_seconds(level.bandwidth)[window]
    exchange[0] = 0.0

    def last(workers: int, replicas: int) -> Matrix:
        """The last stage of those on `workers` components, on `replicas` of them."""
        return stage(replicas, level.count - workers + replicas)

    slowest = np.full((level.count + 1, len(exchange)), np.inf)
    slowest[0, 0] = 0.0
    for workers in range(1, level.count + 1):
        for replicas in range(1, workers + 1):
            before = np.maximum(slowest[workers - replicas], exchange)
            begins = np.flatnonzero(before < inf)
            if len(begins):
                table = np.maximum(before[begins, None], last(workers, replicas)[window, window][begins])
                np.minimum(slowest[workers], table.min(axis=0), out=slowest[workers])
    limit = float(slowest[-1, -1])
    if limit == inf:
        return limit, ()
    return limit, _fewest_stages(level.count, exchange, last, start, limit)


def _fewest_stages(
    count: int, exchange: Matrix, last_stage: Callable[[int, int], Matrix], start: int, limit: float
) -> tuple[tuple[int, int, int], ...]:
    """The stages of a pipeline with nothing slower than `limit`: the fewest, then the most balanced."""
    size = len(exchange)
    window, columns = slice(start, start + size), np.arange(size)
    least = np.full((count + 1, size), np.inf)
    least[0, 0] = 0.0
    cuts = np.zeros((count + 1, size), dtype=np.intp)
    last = np.zeros((count + 1, size), dtype=np.intp)
    priced: dict[int, Matrix] = {}
    for workers in range(1, count + 1):
        for replicas in range(workers, 0, -1):
            whole = last_stage(workers, replicas)
            if id(whole) not in priced:
                seconds = whole[window, window]
                # The squares of at most `count` stages add up to less than one more stage.
                balance = (np.minimum(seconds, limit) / (limit or 1.0)) ** 2 / (count + 1)
                priced[id(whole)] = np.where(seconds <= limit, 1.0 + balance, np.inf)
            begins = np.flatnonzero((exchange <= limit) & (least[workers - replicas] < inf))
            if not len(begins):
                continue
            table = least[workers - replicas][begins, None] + priced[id(whole)][begins]
            cut = table.argmin(axis=0)
            price = table[cut, columns]
            better = price < least[workers]
            least[workers][better] = price[better]
            cuts[workers][better] = begins[cut[better]]
            last[workers][better] = replicas
    stages: list[tuple[int, int, int]] = []
    workers, end = count, size - 1
    while workers:
        replicas, first = int(last[workers, end]), int(cuts[workers, end])
        stages.append((start + first, start + end, replicas))
        workers, end = workers - replicas, first
    return tuple(reversed(stages))
