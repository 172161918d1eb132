"""The recurrence of PipeDream's partitioner, one level of the machine at a time.

SOSP'19, section 3.1. With A the time of the slowest stage of the best pipeline, T that of one replicated stage, a the
bytes over a cut and B_k the bandwidth of level k:

    A^0(i->j)      =  seconds of the layers
    T^k(i->j, m)   =  max(A^(k-1)(i->j, m_(k-1)), all-reduce of the weights among m) / m
    A^k(i->j, m)   =  min of  T^k(i->j, m)                                            one stage on all m
                              max(A^k(i->s, m-m'), 2 a_s / B_k, T^k(s->j, m'))        for i < s < j, 1 <= m' < m

The first candidate is not in the printed recurrence, which therefore cannot express data parallelism, nor a replicated
first stage; the text around it means it. A level below the top is needed for all i and j; there only values are kept.
Back-pointers are made for one interval at a time, by `cheapest_pipeline` at each level down from the top.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.planning.costs import AllReduce, ChainCosts, Flags, Matrix, replicated_seconds

__all__ = ["Block", "Level", "Pipeline", "cheapest_pipeline", "raise_level"]


@dataclass(frozen=True, slots=True)
class Level:
    """`count` components joined by links of `bandwidth` bytes per second."""

    count: int
    bandwidth: float
    allreduce: AllReduce


@dataclass(frozen=True, slots=True)
class Block:
    """Layers `start` up to and without `stop` on `replicas` components of the level below."""

    start: int
    stop: int
    replicas: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The best pipeline of an interval of layers on one component of a level."""

    seconds: float
    blocks: tuple[Block, ...]


def raise_level(costs: ChainCosts, below: Matrix, level: Level) -> Matrix:
    """``A^k(i -> j, m_k)`` for all i and j, from ``A^(k-1)(i -> j, m_(k-1))``. O(N^3 m^2), vectorised over i and j."""
    stages = _replicated(costs, below, level)
    exchange = costs.exchanged_bytes / level.bandwidth
    best = [below]
    for workers in range(2, level.count + 1):
        table = stages[workers - 1].copy()
        for replicas in range(1, workers):
            left, right = best[workers - replicas - 1], stages[replicas - 1]
            for cut in range(1, costs.layers):
                before = np.maximum(left[:cut, cut], exchange[cut])
                corner = table[:cut, cut + 1 :]
                np.minimum(corner, np.maximum(before[:, None], right[None, cut, cut + 1 :]), out=corner)
        best.append(table)
    return best[-1]


def cheapest_pipeline(
    costs: ChainCosts,
    below: Matrix,
    level: Level,
    start: int,
    stop: int,
    fits: Callable[[int, int], Flags] | None = None,
) -> Pipeline:
    """``A^k(start -> stop, m_k)`` with its stages. O(n^2 m^2) for n layers, vectorised over both ends of a stage.

    ``fits(replicas, behind)``, if given, says of every interval whether it fits in memory as a stage of so many
    replicas with `behind` workers in it and behind it. If nothing fits, the seconds are infinite, without stages.

    Plans tie often. Of those with the least seconds this takes one with the fewest stages (fewer versions of weights,
    less in flight), and of these one with the smallest sum of squared stage times: the most balanced.
    """
    window = slice(start, stop + 1)
    tables = [table[window, window] for table in _replicated(costs, below, level)]
    exchange = costs.exchanged_bytes[window] / level.bandwidth
    exchange[0] = 0.0

    def stage(workers: int, replicas: int) -> Matrix:
        """The last of the stages on `workers` components, on `replicas` of them."""
        if fits is None:
            return tables[replicas - 1]
        allowed = fits(replicas, level.count - workers + replicas)[window, window]
        return np.where(allowed, tables[replicas - 1], np.inf)

    slowest = np.full((level.count + 1, len(exchange)), np.inf)
    slowest[0, 0] = 0.0
    for workers in range(1, level.count + 1):
        for replicas in range(1, workers + 1):
            before = np.maximum(slowest[workers - replicas], exchange)
            table = np.maximum(before[:, None], stage(workers, replicas))
            np.minimum(slowest[workers], table.min(axis=0), out=slowest[workers])
    limit = float(slowest[-1, -1])
    if limit == np.inf:
        return Pipeline(limit, ())
    return Pipeline(limit, _fewest_stages(level.count, exchange, stage, start, limit))


def _fewest_stages(
    count: int, exchange: Matrix, stage: Callable[[int, int], Matrix], start: int, limit: float
) -> tuple[Block, ...]:
    """The stages of a pipeline with nothing slower than `limit`: the fewest, then the most balanced."""
    size = len(exchange)
    columns = np.arange(size)
    prices = np.full((count + 1, size), np.inf)
    prices[0, 0] = 0.0
    cuts = np.zeros((count + 1, size), dtype=np.intp)
    last = np.zeros((count + 1, size), dtype=np.intp)
    for workers in range(1, count + 1):
        for replicas in range(workers, 0, -1):
            before = np.where(exchange <= limit, prices[workers - replicas], np.inf)
            seconds = stage(workers, replicas)
            # The squares of at most `count` stages add up to less than one more stage.
            balance = (np.minimum(seconds, limit) / (limit or 1.0)) ** 2 / (count + 1)
            table = before[:, None] + np.where(seconds <= limit, 1.0 + balance, np.inf)
            cut = table.argmin(axis=0)
            price = table[cut, columns]
            better = price < prices[workers]
            prices[workers][better] = price[better]
            cuts[workers][better] = cut[better]
            last[workers][better] = replicas
    blocks: list[Block] = []
    workers, end = count, size - 1
    while workers:
        replicas, first = int(last[workers, end]), int(cuts[workers, end])
        blocks.append(Block(start + first, start + end, replicas))
        workers, end = workers - replicas, first
    return tuple(reversed(blocks))


def _replicated(costs: ChainCosts, below: Matrix, level: Level) -> list[Matrix]:
    """``T^k(i -> j, m)`` for m from 1."""
    return [
        replicated_seconds(below, costs.parameter_bytes, replicas, level.bandwidth, level.allreduce)
        for replicas in range(1, level.count + 1)
    ]
