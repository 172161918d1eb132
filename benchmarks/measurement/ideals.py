"""What a step would take at best, and what a measured step is worth beside it: arithmetic on seconds.

The perfect step of p processes is that of one process, divided by p, times the measured slowdown of p busy processes.
The ideal step of a schedule is longer by its bubble, as it is where all stages cost the same and messages cost nothing;
the simulator tells it. A bubble is not slowed down, since a process idles then. (With two processes that is exact; with
more, several may still be busy, so that the ideal is a bound.)

All seconds come in series, one number for each round. What slows a whole round down leaves ratios within it alone, so
every figure is the median over the rounds of a ratio, and not a ratio of medians.
"""

import statistics
from collections.abc import Mapping, Sequence

import penstock
from penstock.scheduling.schedules import Schedule

Series = Sequence[float]


def lengthening(schedule: Schedule) -> float:
    """The ideal step over the perfect one, if nothing is slowed down: 1 without a flush, ``1 + (p - 1) / (m v)`` for
    1F1B with one.

    Forwards take half as long as backwards, whose two parts, where a schedule splits them, take the same.
    """
    if not schedule.flushes:
        return 1.0
    layer = penstock.LayerProfile("stage", 1.0, 2.0, cut_bytes=0, saved_bytes=0, parameter_bytes=1)
    profile = penstock.Profile((layer,) * schedule.stages, microbatch_size=1)
    cluster = penstock.Cluster.uniform(schedule.ranks, bandwidth=1e12)
    return 1 / (1 - penstock.simulate(schedule, profile, cluster, minibatches=1).bubble)


def flush_lengthening(processes: int, microbatches: int, stages_per_rank: int) -> float:
    """``1 + (p - 1) / (m v)``: of torch's schedules that flush and do not split their backwards."""
    return 1 + (processes - 1) / (microbatches * stages_per_rank)


def ideal_seconds(single: Series, slowdowns: Series, processes: int, lengthening: float = 1.0) -> list[float]:
    """The ideal step of each round; the perfect one without a `lengthening`."""
    rounds = zip(single, slowdowns, strict=True)
    return [alone / processes * (slower + lengthening - 1) for alone, slower in rounds]


def speedup(other: Series, own: Series) -> float:
    """How many times as fast a contender is as `other`."""
    return statistics.median(theirs / mine for theirs, mine in zip(other, own, strict=True))


def overhead(ideal: Series, own: Series, actions: int) -> float:
    """Seconds that each of a rank's `actions` takes beyond the ideal."""
    return statistics.median((mine - least) / actions for least, mine in zip(ideal, own, strict=True))


def fastest(times: Mapping[str, Series]) -> str | None:
    """The name with the least median; None if there are no names."""
    return min(times, key=lambda name: statistics.median(times[name]), default=None)
