"""Cutting a chain into a given number of stages, one rank each.

PipeDream's recurrence without replication: make the slowest stage or link as fast as possible. Without replication the
levels of the machine matter only through the link that each cut lies on, so any cluster will do, a matrix too. Where
one large layer decides the slowest stage, many partitions are equally good by that measure; of these the most balanced
is taken, the one with the smallest sum of squared stage times.
"""

from collections.abc import Sequence

import numpy as np

from penstock.planning.costs import ChainCosts, Flags

__all__ = ["cut_evenly"]


def cut_evenly(
    costs: ChainCosts, bandwidths: Sequence[float], fits: Sequence[Flags] | None = None
) -> tuple[float, tuple[int, ...]]:
    """(Slowest seconds, cuts): stage s holds layers ``[cuts[s], cuts[s + 1])``. O(p N^2), vectorised over both ends.

    There is one stage more than `bandwidths`; the cut after stage s goes over ``bandwidths[s]`` bytes per second.
    ``fits[s]``, if given, says of every interval whether it fits in memory as stage s. If there are fewer layers
    than stages, or nothing fits, the seconds are infinite and there are no cuts.
    """
    stages = len(bandwidths) + 1
    seconds = [costs.seconds if fits is None else np.where(fits[s], costs.seconds, np.inf) for s in range(stages)]
    exchange = [np.zeros(costs.layers + 1), *(costs.exchanged_bytes / bandwidth for bandwidth in bandwidths)]

    slowest = seconds[0][0]
    for stage, sent in zip(seconds[1:], exchange[1:], strict=True):
        slowest = np.maximum(np.maximum(slowest, sent)[:, None], stage).min(axis=0)
    limit = float(slowest[-1])
    if limit == np.inf:
        return limit, ()

    first = np.where(seconds[0][0] <= limit, seconds[0][0] ** 2, np.inf)
    totals, choices = [first], [np.zeros(costs.layers + 1, dtype=np.intp)]
    for stage, sent in zip(seconds[1:], exchange[1:], strict=True):
        before = np.where(sent <= limit, totals[-1], np.inf)
        table = before[:, None] + np.where(stage <= limit, stage**2, np.inf)
        choices.append(table.argmin(axis=0))
        totals.append(table.min(axis=0))
    cuts = [costs.layers]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return limit, tuple(reversed(cuts))
