"""Clipping of gradients by their global norm, as PyTorch does it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.errors import PenstockError

__all__ = ["check_clip", "clipped"]

EPSILON = 1e-6
"""Of ``torch.nn.utils.clip_grad_norm_``."""


def check_clip(most: float | None) -> None:
    """Raises `PenstockError` if `most` is neither None nor a norm."""
    if most is not None and not (isinstance(most, int | float) and most > 0):
        raise PenstockError(
            f"clip_grad_norm={most!r}: expected the largest norm that gradients may have, such as 1.0, or None"
        )


def clipped(gradients: Mapping[str, Tensor], most: float, total: Tensor) -> dict[str, Tensor]:
    """`gradients` times ``most / total`` if `total`, the norm, is above `most`. New tensors."""
    factor = torch.clamp(most / (total + EPSILON), max=1.0)
    return {name: gradient * factor.to(gradient.device) for name, gradient in gradients.items()}
