"""What a user's `loss_fn` may return: the loss, and numbers beside it."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import PenstockError

__all__ = ["LossFunction", "compute_loss"]

LossFunction: TypeAlias = Callable[[Any, Any], Any]
"""``loss_fn(output, target)``: the mean over the microbatch's samples as a tensor, or that and a dict of metrics."""


def compute_loss(loss_fn: LossFunction, output: Any, target: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the metrics by name, each a tensor of one number without history.

    `PenstockError` if `loss_fn` returns something else.
    """
    found = loss_fn(output, target)
    loss, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise PenstockError(
            "loss_fn(output, target) must return one number as a tensor, the mean over the microbatch's samples, or "
            f"that and a dict of metrics; it returned {shown}. Reduce it, for instance with .mean()"
        )
    if not isinstance(metrics, Mapping):
        raise PenstockError(
            f"loss_fn returned {metrics!r} beside the loss: expected a dict from name to number, the metrics"
        )
    return loss, {name: _as_number(name, value, loss.device) for name, value in metrics.items()}


def _as_number(name: str, value: Any, device: torch.device) -> Tensor:
    number = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device=device)
    if not isinstance(name, str) or not name or len(name.splitlines()) > 1 or number.numel() != 1:
        raise PenstockError(
            f"loss_fn returned the metric {name!r} of shape {tuple(number.shape)}: expected a name of one line and one "
            "number, the mean over the microbatch's samples"
        )
    return number
