"""Clips gradients by their global norm, as PyTorch does."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.training.tensor_lists import multiply

__all__ = ["check_clip", "clip"]

EPSILON = 1e-6
"""The constant of ``torch.nn.utils.clip_grad_norm_``."""


def check_clip(max_norm: float | None) -> None:
    """Raises `PenstockError` if `max_norm` is neither None nor a norm."""
    if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm > 0):
        raise PenstockError(
            f"clip_grad_norm={max_norm!r}: expected the largest norm that gradients may have, such as 1.0, or None"
        )


def clip(gradients: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
    """Multiplies `gradients` by ``max_norm / total`` if `total`, their norm, is above `max_norm`.

    It works in place, which takes no memory for a second set of them: nothing else may hold them.
    """
    multiply(gradients, torch.clamp(max_norm / (total + EPSILON), max=1.0))
