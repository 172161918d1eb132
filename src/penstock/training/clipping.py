"""Clipping of gradients by their global norm, as PyTorch does it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.training.tensor_lists import multiply

__all__ = ["check_clip", "clip"]

EPSILON = 1e-6
"""Of ``torch.nn.utils.clip_grad_norm_``."""


def check_clip(most: float | None) -> None:
    """Raises `PenstockError` if `most` is neither None nor a norm."""
    if most is not None and not (isinstance(most, int | float) and most > 0):
        raise PenstockError(
            f"clip_grad_norm={most!r}: expected the largest norm that gradients may have, such as 1.0, or None"
        )


def clip(gradients: Sequence[Tensor], most: float, total: Tensor) -> None:
    """Multiplies `gradients` by ``most / total`` if `total`, the norm, is above `most`.

    In place, so that no second set of them takes memory: nobody else may hold them.
    """
    multiply(gradients, torch.clamp(most / (total + EPSILON), max=1.0))
