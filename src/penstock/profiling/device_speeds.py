"""How fast the devices of all ranks are, measured by what they will do: the layers of the model.

All ranks run the layers at once, as they will in training, so that processes of one host slow each other down alike.
The least of several times counts, since other work on a machine only ever adds to it. Even so, equal devices differ a
little from one measurement to the next. So devices count as different only if they differ by more than that.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import torch

from penstock.capturing.chain import LayerChain
from penstock.profiling.clocks import windows
from penstock.profiling.profiler import profile
from penstock.runtime.transport.worlds import World, gather_results

_DIFFERENT = 1.3
"""How many times as long the slowest device takes as the fastest before they count as different."""

_ALIKE = 1.15
"""Up to this ratio two devices are of one class, where some are different."""

_ROUND_SECONDS = (0.2, 0.6, 1.2)
"""How long all ranks measure. Where they seem to differ they measure again, at most so often."""

_WINDOWS = 8
"""The least number of windows in a round."""


def measure_speeds(
    world: World, chain: LayerChain, sample: tuple[Any, ...] | dict[str, Any], autocast: torch.dtype | None
) -> tuple[float, ...]:
    """How many times as fast as that of rank 0 the device of every rank is; empty if all are about equal. Collective.

    An error on one rank is raised on all.
    """
    if world.processes == 1:
        return ()
    run = partial(profile, chain, sample, autocast=autocast, iterations=1, warmup=1, progress=False)
    least = [inf] * world.processes
    speeds: tuple[float, ...] = ()
    for seconds in _ROUND_SECONDS:
        found = gather_results(world, "while it measured its speed", partial(_least_window, run, seconds))
        # Other work on a machine only ever adds to a time.
        least = list(map(min, least, found))
        speeds = compare_seconds(least)
        if not speeds:
            break
    return speeds


def _least_window(run: Callable[[], object], seconds: float) -> float:
    """The least mean time of a run over a window, of those that fit into `seconds`, and of eight at least."""
    # The whole time of a window counts, so that a device that stands still between two layers is slow, too.
    return min(windows(run, seconds, _WINDOWS))


def compare_seconds(seconds: Sequence[float]) -> tuple[float, ...]:
    """The speeds of devices that take `seconds` for the same work, relative to the first; empty if all are equal.

    Devices that are nearly equal get one speed, the middle one of theirs.
    """
    least, most = min(seconds), max(seconds)
    if not least > 0 or most <= _DIFFERENT * least:
        return ()
    classes: list[list[float]] = []
    for each in sorted(seconds):
        if classes and each <= _ALIKE * classes[-1][-1]:
            classes[-1].append(each)
        else:
            classes.append([each])
    middle = {each: members[len(members) // 2] for members in classes for each in members}
    return tuple(middle[seconds[0]] / middle[each] for each in seconds)
