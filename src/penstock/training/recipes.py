"""The options that say how a pipeline trains, apart from its schedule."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from penstock.training.clipping import check_clip
from penstock.training.losses import LossFunction, LossWeight, model_loss
from penstock.training.nonfinite import SKIPPING, OnNonfinite, check_on_nonfinite
from penstock.training.optimizers import MakeOptimizer, MakeScheduler
from penstock.training.precisions import autocasting, check_autocast, check_version_dtype
from penstock.training.scaling import LossScale, read_loss_scale
from penstock.training.update_hooks import UpdateHook, check_hooks

__all__ = ["Recipe"]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """Holds arguments of `Pipeline` and `reference_train`, which explain them. Raises `PenstockError` if one
    is wrong.
    """

    loss_fn: LossFunction
    optimizer: MakeOptimizer
    autocast: torch.dtype | None = None
    loss_scale: LossScale | str | float | None = None
    clip_grad_norm: float | None = None
    lr_scheduler: MakeScheduler | None = None
    scale_learning_rates: bool = False
    loss_weight: LossWeight | None = None
    version_dtype: torch.dtype | None = None
    update_hooks: Sequence[UpdateHook] = ()
    on_nonfinite: OnNonfinite = "raise"

    def __post_init__(self) -> None:
        check_autocast(self.autocast)
        check_clip(self.clip_grad_norm)
        read_loss_scale(self.loss_scale)
        check_version_dtype(self.version_dtype, self.autocast)
        check_hooks(self.update_hooks)
        check_on_nonfinite(self.on_nonfinite)

    @property
    def hooks(self) -> tuple[UpdateHook, ...]:
        """`update_hooks`, in order."""
        return tuple(self.update_hooks)

    @property
    def scaling(self) -> LossScale | None:
        """The rule that `loss_scale` asks for, or that skips updates without it."""
        return SKIPPING if self.loss_scale is None and self.on_nonfinite == "skip" else read_loss_scale(self.loss_scale)

    @property
    def checks_losses(self) -> bool:
        """Whether a loss that is not finite is an error. With a loss scale it is a reason to lower the scale."""
        return self.on_nonfinite == "raise" and self.loss_scale is None

    @property
    def reads_model_loss(self) -> bool:
        """Whether the model computes its loss itself, from labels among its inputs."""
        return self.loss_fn is model_loss

    @property
    def needs_norms(self) -> bool:
        """Whether stages must exchange the norms of their gradients."""
        return self.clip_grad_norm is not None or self.scaling is not None

    def keeps_masters(self, delays: Iterable[int]) -> bool:
        """Whether forwards may read other weights than those that the optimizer steps. `delays`: by stage, how many
        updates old its gradients are.
        """
        return self.version_dtype is not None or any(map(self.predicts, delays))

    def predicts(self, delay: int) -> bool:
        """Whether a hook predicts the weights for forwards, where gradients are `delay` updates old."""
        return any(hook.predicts(delay) for hook in self.hooks)

    def autocast_context(self, device: torch.device) -> AbstractContextManager[None]:
        """The context of a forward and its loss on `device`."""
        return autocasting(self.autocast, device)
