"""PyTorch's optimizers: the hooks on their steps, and schedulers of schedulers. Tried on torch 2.11 and 2.13."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[Callable[..., Any], ...]:
    """The hooks on the steps of `optimizer` that are not Penstock's own. No public name lists them.

    Without the private names: none, and Penstock does not see hooks that it would refuse.
    """
    tables = (getattr(optimizer, f"_optimizer_step_{kind}_hooks", {}) for kind in ("pre", "post"))
    hooks = (hook for table in tables for hook in table.values())
    return tuple([hook for hook in hooks if not getattr(hook, "__module__", "").startswith("penstock.")])


def flat_schedulers(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """`scheduler`, or those that a `SequentialLR` or `ChainedScheduler` consists of, which no public name lists."""
    parts = getattr(scheduler, "_schedulers", None)
    if parts is None:
        yield scheduler
    else:
        for part in parts:
            yield from flat_schedulers(part)
