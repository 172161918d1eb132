"""Calls a user's `loss_fn` and checks its results: the loss, and metrics beside it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import PenstockError

__all__ = ["LossFunction", "LossWeight", "amount_of", "check_amounts", "compute_loss"]

LossFunction: TypeAlias = Callable[[Any, Any], Any]
"""``loss_fn(output, target)``: the mean over the microbatch's samples as a tensor, or that and a dict of metrics."""


LossWeight: TypeAlias = Callable[[Any], Tensor | float]
"""``loss_weight(target)``: the number of items (tokens, for example) that the loss for `target` is the mean over."""


def amount_of(weigh: LossWeight | None, target: Any, samples: int) -> float:
    """The number of items that the loss for `target` is the mean over: ``weigh(target)``, or its samples.

    Raises `PenstockError` unless it is a number of at least 0.
    """
    if weigh is None:
        return samples
    found = weigh(target)
    amount = (
        float(found) if isinstance(found, int | float) or (isinstance(found, Tensor) and found.numel() == 1) else -1
    )
    if not 0 <= amount < math.inf:
        raise PenstockError(
            f"loss_weight(target) returned {found!r}: expected one number of at least 0, such as the tokens that count"
        )
    return amount


def check_amounts(amounts: Sequence[float]) -> None:
    """Raises `PenstockError` if a minibatch has no item that its loss could be the mean over."""
    if not sum(amounts):
        raise PenstockError(
            "loss_weight(target) is 0 for every microbatch of this minibatch: expected at least one item that its "
            "loss can be the mean over. Leave such batches out"
        )


def compute_loss(loss_fn: LossFunction, output: Any, target: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the metrics by name, each a tensor of one number without history.

    Raises `PenstockError` if `loss_fn` returns something else.
    """
    found = loss_fn(output, target)
    if type(found) is Tensor and found.numel() == 1:
        return found, {}
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
    if isinstance(value, Tensor):
        number = value.detach()
    elif isinstance(value, int | float):
        # Made on the device: a copy to a GPU would make its host wait.
        number = torch.full((), value, dtype=torch.float64, device=device)
    else:
        number = torch.tensor(value, dtype=torch.float64, device=device)
    if not isinstance(name, str) or not name or len(name.splitlines()) > 1 or number.numel() != 1:
        raise PenstockError(
            f"loss_fn returned the metric {name!r} of shape {tuple(number.shape)}: expected a name of one line and one "
            "number, the mean over the microbatch's samples"
        )
    return number
