"""PyTorch's optimizers: the hooks on their steps. Tried on torch 2.11 and 2.13."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["step_hooks"]


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[Callable[..., Any], ...]:
    """The hooks that the user registered on the steps of `optimizer`. No public name lists them.

    Without the private names: none, and Penstock does not see hooks that it would refuse.
    """
    tables = (getattr(optimizer, f"_optimizer_step_{kind}_hooks", {}) for kind in ("pre", "post"))
    return tuple(hook for table in tables for hook in table.values())
