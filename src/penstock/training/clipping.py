"""Clips gradients by their global norm, as PyTorch does."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.training.tensor_lists import multiply

EPSILON = 1e-6
"""The constant of ``torch.nn.utils.clip_grad_norm_``."""


def clip(gradients: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
    """Multiplies `gradients` by ``max_norm / total`` if `total`, their norm, is above `max_norm`.

    It works in place, which takes no memory for a second set of them: nothing else may hold them.
    """
    multiply(gradients, torch.clamp(max_norm / (total + EPSILON), max=1.0))
