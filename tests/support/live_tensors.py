"""The tensors alive in this process, and their number once the threads of the transport are at rest."""

import gc
import time
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

SAME = 5
"""This number of counts in a row must agree, 10 ms apart, where there are several processes."""
LOOKS = 200
"""So often a number above that of the step before is looked at again: it is a leak only if it stays."""


def forget_what_is_there() -> None:
    """What is alive now is neither searched nor counted from here on: other tests' leftovers go when they like."""
    gc.collect()
    gc.freeze()


def live_tensors() -> list[Tensor]:
    """All objects that the garbage collector tracks and that are not frozen."""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def count_at_rest(before: Sequence[int] = ()) -> int:
    """How many tensors are alive after a step; `before` has the numbers after the earlier ones.

    A thread that sends or receives holds its tensors for a moment longer than the step that asked for it, and longer
    on a busy machine. No process goes on before all have counted.
    """
    if not dist.is_initialized():
        return len(live_tensors())
    dist.barrier()
    counts: list[int] = []
    while len(counts) < LOOKS:
        counts.append(len(live_tensors()))
        if len(set(counts[-SAME:])) == 1 and len(counts) >= SAME and counts[-1] <= min(before, default=counts[-1]):
            break
        time.sleep(0.01)
    dist.barrier()
    return counts[-1]
