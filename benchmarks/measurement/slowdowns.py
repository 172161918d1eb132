"""How much longer work takes in company: processes of one machine share its cores, caches and memory."""

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from measurement.launches import alone, everywhere, timed

BETWEEN_BARRIERS = 0.02
"""Seconds of work for which a barrier, of a fraction of a millisecond, does not count."""


def seconds_in_company(
    work: Callable[[], object], groups: Sequence[dist.ProcessGroup | None], least: float
) -> tuple[float, ...]:
    """Seconds of `work` when 1, 2, ... processes do it at once. Collective.

    `groups`: of the first 1, 2, ... processes. `least`: about how many seconds of each are measured. A group waits for
    its slowest.
    """
    single = alone(lambda: timed(work, least))
    count = max(4, round(least / single))
    # As stages wait for each other: three processes do not share two cores evenly.
    together = max(1, round(BETWEEN_BARRIERS / single))
    found = []
    for busy, group in enumerate(groups, 1):
        dist.barrier()
        if dist.get_rank() < busy:
            start = time.perf_counter()
            for number in range(count):
                work()
                if number % together == together - 1:
                    dist.barrier(group)
            found.append((time.perf_counter() - start) / count)
        else:
            found.append(0.0)
    return tuple(max(column) for column in zip(*everywhere(found), strict=True))


def groups_up_to(processes: int) -> list[dist.ProcessGroup | None]:
    """The groups of the first 1, 2, ... `processes` processes. Collective."""
    return [dist.new_group(list(range(count))) for count in range(1, processes + 1)]
