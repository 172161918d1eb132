"""Cuts a chain into a given number of stages whose ranks are known.

This is PipeDream's recurrence without the choice of replicas: it makes the slowest stage or link as fast as possible.
The levels of the machine matter only through the link of each cut, so it works for any cluster, also for a matrix.
Where one large layer determines the slowest stage, many partitions are equally fast; of these the most balanced is
taken, the one with the smallest sum of squared stage times.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Matrix: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]

StageSeconds: TypeAlias = Callable[[int, Counts], Matrix]
"""A function of (stage, starts) to the seconds of the layers from each start up to each stop as this stage,
(len(starts), N+1); infinite if the stage is empty or does not fit."""


_BITS = 24
"""The bits of what the layers of a chain weigh together in `balanced_cuts`. Sums of squares of such numbers are exact.
"""


def balanced_cuts(weights: Sequence[float], stages: int, speeds: Sequence[float] = ()) -> tuple[int, ...]:
    """The cuts whose largest stage weighs least: stage s holds layers ``[cuts[s], cuts[s + 1])``, at least one.

    `weights`: of each layer, at least as many as `stages`; only their ratios count. Of all such cuts those with the
    least sum of squares, and of these those whose earlier stages are longer. So layers of one weight are cut as
    `Plan.uniform` does. Exact, in O(stages * layers^2). `speeds`: of each stage, by which its weight is divided.
    """
    # By a power of two: whole numbers stay exact, so that equal stages are seen as equal.
    unit = float(np.ldexp(1.0, np.frexp(sum(weights))[1] - _BITS)) or 1.0
    # From the last layer to the first: `cut_evenly` puts what is left over into the stages behind.
    whole = np.array([round(weight / unit) for weight in reversed(weights)], dtype=np.float64)
    before = np.concatenate([[0.0], np.cumsum(whole)])
    seconds = np.where(np.tri(len(before), dtype=bool), np.inf, before[None, :] - before[:, None])
    exchange = [np.zeros(len(before))] * (stages - 1)

    def stage_seconds(stage: int, starts: Counts) -> Matrix:
        own = seconds[starts]
        return own / speeds[stages - 1 - stage] if speeds else own

    limit = least_bottleneck(stage_seconds, exchange)
    cuts = cut_evenly(stage_seconds, exchange, limit)
    return tuple(len(weights) - cut for cut in reversed(cuts))


def least_bottleneck(stage_seconds: StageSeconds, exchange: Sequence[Matrix]) -> float:
    """The least slowest seconds of ``len(exchange) + 1`` stages; infinite if nothing fits. O(p N^2).

    ``exchange[s]`` (N+1,): the seconds of the cut behind stage s, at each position.
    """
    slowest = stage_seconds(0, np.zeros(1, dtype=np.int64))[0]
    for stage, sent in enumerate(exchange, start=1):
        before = np.maximum(slowest, sent)
        starts = np.flatnonzero(before < np.inf)
        if not len(starts):
            return np.inf
        slowest = np.maximum(before[starts, None], stage_seconds(stage, starts)).min(axis=0)
    return float(slowest[-1])


def cut_evenly(stage_seconds: StageSeconds, exchange: Sequence[Matrix], limit: float) -> tuple[int, ...]:
    """Cuts: stage s holds layers ``[cuts[s], cuts[s + 1])`` and nothing is slower than `limit`. O(p N^2).

    Of all such cuts those with the least sum of squared stage times; empty if there are none.
    """
    # A power of two: whole numbers stay exact, so that equal cuts are seen as equal.
    scale = float(np.ldexp(1.0, np.frexp(limit)[1]))

    def price(stage: int, starts: Counts) -> Matrix:
        seconds = stage_seconds(stage, starts)
        return np.where(seconds <= limit, (np.minimum(seconds, limit) / scale) ** 2, np.inf)

    total = price(0, np.zeros(1, dtype=np.int64))[0]
    choices = [np.zeros(len(total), dtype=np.int64)]
    for stage, sent in enumerate(exchange, start=1):
        starts = np.flatnonzero((total < np.inf) & (sent <= limit))
        if not len(starts):
            return ()
        table = total[starts, None] + price(stage, starts)
        best = table.argmin(axis=0)
        choices.append(starts[best])
        total = table[best, np.arange(len(best))]
    if total[-1] == np.inf:
        return ()
    cuts = [len(total) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(reversed(cuts))
