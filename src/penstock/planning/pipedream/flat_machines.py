"""The fastest pipeline with replicas on a flat machine, where any workers may hold any stage.

This is PipeDream's recurrence with one level [PipeDream 2019, section 3.1] as a decision problem: "is there a pipeline
in which nothing is slower than X?", with bisection over X. The decision is cheap. Layers i up to j as a stage on r
workers get slower, and need more memory, with every further layer; so for each i and r there is one furthest j. u + r
workers can hold the layers from i on if u workers can hold those from some j on, with j no further than that; only the
nearest such j needs to be examined. That takes O(m^2 N) for m workers and N layers, where the recurrence takes
O(m^2 N^2). Bisection ends on the exact time of a stage or cut, so the result is exact.

It proceeds from the last layer to the first, because what a stage keeps in memory depends on the workers behind it
(`live_counts`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.planning.memory import Room, held_bytes
from penstock.planning.stage_costs import AllReduce, ChainCosts, Counts, Flags, Matrix, replicated_seconds
from penstock.values.chain_cuts import cut_evenly


@dataclass(frozen=True, slots=True)
class MachineLevel:
    """A level of the machine: `count` components, connected by links of `bandwidth` bytes per second."""

    count: int
    bandwidth: float
    allreduce: AllReduce


@dataclass(frozen=True, slots=True)
class ReplicatedStage:
    """A stage: the layers `start` up to and without `stop` on `replicas` components of the level below."""

    start: int
    stop: int
    replicas: int


@dataclass(frozen=True, slots=True)
class ReplicatedPipeline:
    """The best pipeline of an interval of layers on one component of a level."""

    seconds: float
    stages: tuple[ReplicatedStage, ...]


def fastest_flat(costs: ChainCosts, level: MachineLevel, room: Room | None = None) -> ReplicatedPipeline:
    """The pipeline on all workers of `level` whose slowest stage or link is fastest, and which fits in `room`.

    Plans tie often. Of those with the least seconds this takes one with the fewest stages (fewer versions of weights,
    less in flight), with the most balanced cuts for the replicas that it has found. If nothing fits, the seconds are
    infinite, without stages.
    """
    machine = _FlatMachine(costs, level, None if room is None else _memory_reach(costs, level.count, room))
    limit = machine.least_limit()
    return ReplicatedPipeline(limit, machine.stages(limit) if limit < np.inf else ())


@dataclass(frozen=True, slots=True)
class _Reach:
    """How many layers a stage can have before it no longer fits in memory."""

    furthest: Counts
    """[c, i]: the largest j for the c-th pair of counts of microbatches in flight and of versions."""
    rows: Counts
    """[u, r]: the c of r replicas with u workers behind them."""

    def of(self, workers_behind: int, replicas: int) -> Counts:
        """(replicas, N+1): the largest j for each i, on 1 to `replicas` workers."""
        return self.furthest[self.rows[workers_behind, 1 : replicas + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class _FlatMachine:
    """Decides, for one chain on one flat machine, whether a pipeline can keep a time limit."""

    costs: ChainCosts
    level: MachineLevel
    memory: _Reach | None

    @property
    def exchange(self) -> Matrix:
        return self.costs.exchange_seconds(self.level.bandwidth)

    def least_limit(self) -> float:
        """The least X such that some pipeline has nothing slower than X; infinite if nothing fits in memory."""
        if not self.feasible(np.inf):
            return np.inf
        high = self._candidates(np.inf)[0]
        # Even without an all-reduce, r workers take at least a layer's seconds / r.
        low = self._candidates(float(self.costs.seconds[0, -1]) / self.level.count * (1 - 1e-9) - 1e-300)[1]
        while low < high:
            middle = _float((_bits(low) + _bits(high)) // 2)
            furthest = self.furthest(middle)
            if self.feasible(middle, furthest):
                high = self._candidates(middle, furthest)[0]
            else:
                low = self._candidates(middle, furthest)[1]
        return high

    def furthest(self, limit: float) -> Counts:
        """[r - 1, i]: the largest j such that layers i up to j on r workers take no more than `limit`; i if none."""
        count, size = self.level.count, self.costs.layers + 1
        if limit == np.inf:
            return np.full((count, size), size - 1)
        return _largest((count, size), lambda stops: self._seconds(stops) <= limit)

    def feasible(self, limit: float, furthest: Counts | None = None) -> bool:
        """Whether all workers can be used with nothing slower than `limit`."""
        if furthest is None:
            furthest = self.furthest(limit)
        open_cuts = self.exchange <= limit
        done = np.zeros((self.level.count + 1, self.costs.layers + 1), dtype=bool)
        done[0, -1] = True
        for behind in range(self.level.count):
            done[behind] &= open_cuts
            self._extend(done[behind], behind, furthest, done)
        return bool(done[-1, 0])

    def stages(self, limit: float) -> tuple[ReplicatedStage, ...]:
        """The stages of a pipeline with nothing slower than `limit`."""
        furthest = self.furthest(limit)
        replicas = self._replicas(self._layers(limit, furthest), furthest)
        behind = self.level.count
        reach = []
        for count in replicas:
            behind -= count
            own = furthest[count - 1]
            if self.memory is not None:
                own = np.minimum(own, self.memory.of(behind, count)[-1])
            reach.append(own)
        stops = np.arange(self.costs.layers + 1)

        def seconds(stage: int, starts: Counts) -> Matrix:
            allowed = (stops <= reach[stage][starts, None]) & (stops > starts[:, None])
            return np.where(allowed, self._row_seconds(starts, replicas[stage]), np.inf)

        cuts = cut_evenly(seconds, [self.exchange] * (len(replicas) - 1), limit)
        return tuple(ReplicatedStage(*block) for block in zip(cuts[:-1], cuts[1:], replicas, strict=True))

    def _layers(self, limit: float, furthest: Counts) -> list[Flags]:
        """[s][u, i]: whether the layers from i on can be s stages on u workers, up to the least sufficient s."""
        open_cuts = self.exchange <= limit
        done = np.zeros((self.level.count + 1, self.costs.layers + 1), dtype=bool)
        done[0, -1] = True
        layers = [done]
        for _ in range(self.level.count):
            done = np.zeros_like(done)
            for behind in np.flatnonzero(layers[-1][:-1].any(axis=1)):
                self._extend(layers[-1][behind], int(behind), furthest, done)
            layers.append(done & open_cuts)
            if done[-1, 0]:
                return layers
        return []

    def _extend(self, after: Flags, behind: int, furthest: Counts, done: Flags) -> None:
        """Marks in `done` what is possible with one more stage before the layers `after` it on `behind` workers."""
        most = self.level.count - behind
        size = len(after)
        nearest = np.where(after, np.arange(size), size)
        # The nearest cut behind i, so that the stage is not empty.
        nearest[:-1] = np.minimum.accumulate(nearest[::-1])[::-1][1:]
        nearest[-1] = size
        stops = furthest[:most]
        if self.memory is not None:
            stops = np.minimum(stops, self.memory.of(behind, most))
        done[behind + 1 :] |= nearest <= stops

    def _replicas(self, layers: list[Flags], furthest: Counts) -> list[int]:
        """The replicas of the stages, first stage first: each takes about its fair share of the remaining time."""
        start, workers, chosen = 0, self.level.count, []
        for after in reversed(layers[:-1]):
            stops = furthest[:workers, start]
            if self.memory is not None:
                rooms = [self.memory.of(workers - count, count)[-1, start] for count in range(1, workers + 1)]
                stops = np.minimum(stops, rooms)
            positions = np.arange(self.costs.layers + 1)
            allowed = (positions > start) & (positions <= stops[:, None])
            allowed &= after[workers - 1 :: -1]
            seconds = replicated_seconds(
                self.costs.seconds[start],
                self.costs.parameter_bytes[start],
                np.arange(1, workers + 1)[:, None],
                self.level.bandwidth,
                self.level.allreduce,
            )
            fair = self.costs.seconds[start, -1] / workers
            unfair = np.where(allowed, np.abs(seconds - fair), np.inf)
            count, stop = np.unravel_index(int(unfair.argmin()), unfair.shape)
            chosen.append(int(count) + 1)
            workers, start = workers - chosen[-1], int(stop)
        return chosen

    def _candidates(self, limit: float, furthest: Counts | None = None) -> tuple[float, float]:
        """The largest time of a stage or cut that is not above `limit`, and the smallest one above it."""
        if furthest is None:
            furthest = self.furthest(limit)
        starts = np.arange(self.costs.layers + 1)
        exchange = self.exchange
        within = np.where(furthest > starts, self._seconds(furthest), 0.0)
        beyond = np.where(
            furthest < self.costs.layers, self._seconds(np.minimum(furthest + 1, self.costs.layers)), np.inf
        )
        return (
            float(max(within.max(), exchange.max(where=exchange <= limit, initial=0.0))),
            float(min(beyond.min(), exchange.min(where=exchange > limit, initial=np.inf))),
        )

    def _seconds(self, stops: Counts) -> Matrix:
        """The time of layers i up to ``stops[r - 1, i]`` on r workers."""
        flat = stops + np.arange(stops.shape[1]) * stops.shape[1]
        seconds, weights = self.costs.seconds.take(flat), self.costs.parameter_bytes.take(flat)
        replicas = np.arange(1, len(stops) + 1)[:, None]
        return replicated_seconds(seconds, weights, replicas, self.level.bandwidth, self.level.allreduce)

    def _row_seconds(self, starts: Counts, replicas: int) -> Matrix:
        rows = self.costs.seconds[starts], self.costs.parameter_bytes[starts]
        return replicated_seconds(*rows, replicas, self.level.bandwidth, self.level.allreduce)


def _memory_reach(costs: ChainCosts, workers: int, room: Room) -> _Reach:
    """The reach of stages that fit in `room`."""
    rows, in_flight, versions = _count_tables(workers, room)
    size = costs.layers + 1
    firsts = np.arange(size) * size

    def fits(stops: Counts) -> Flags:
        flat = stops + firsts
        sizes = costs.saved_bytes.take(flat), costs.working_bytes.take(flat), costs.parameter_bytes.take(flat)
        held = held_bytes(
            *sizes,
            in_flight=in_flight[:, None],
            versions=versions[:, None],
            optimizer_copies=room.optimizer_copies,
        )
        allowed: Flags = held <= room.size_bytes
        return allowed

    return _Reach(_largest((len(in_flight), size), fits), rows)


def _count_tables(workers: int, room: Room) -> tuple[Counts, Matrix, Matrix]:
    """The rows of `_Reach`, and the counts in flight and of versions of each row."""
    known: dict[tuple[int, int], int] = {}
    rows = np.zeros((workers, workers + 1), dtype=np.int64)
    for behind in range(workers):
        for replicas in range(1, workers - behind + 1):
            counts = room.counts(replicas, behind + replicas)
            rows[behind, replicas] = known.setdefault(counts, len(known))
    pairs = np.array(list(known), dtype=np.float64)
    return rows, pairs[:, 0], pairs[:, 1]


def _largest(shape: tuple[int, int], allowed: Callable[[Counts], Flags]) -> Counts:
    """[k, i]: the largest j >= i for which `allowed` is true, if it is true up to some j and false from there on."""
    low = np.broadcast_to(np.arange(shape[1]), shape)
    high = np.full(shape, shape[1] - 1)
    for _ in range(shape[1].bit_length()):
        middle = (low + high + 1) // 2
        inside = allowed(middle) | (middle == low)
        low, high = np.where(inside, middle, low), np.where(inside, high, middle - 1)
    return low


def _bits(value: float) -> int:
    """The bits of a float as an integer; for floats of 0 or more, both have the same order."""
    return int(np.float64(max(value, 0.0)).view(np.int64))


def _float(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))
