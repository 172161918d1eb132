"""The options that say how a pipeline trains, apart from its schedule."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, get_args

import torch

from penstock.arguments import Rule, check_fields, choice, function, instance, number, text_of
from penstock.errors import PenstockError
from penstock.training.losses import LossFunction, LossWeight, model_loss
from penstock.training.optimizers import MakeOptimizer, MakeScheduler
from penstock.training.scaling import SKIPPING, LossScale, OnNonfinite, read_loss_scale
from penstock.training.update_corrections import UpdateHook, read_hooks
from penstock.training.wire_codecs import WireCodec, WireDtype, read_wire_dtype

_KINDS = (torch.bfloat16, torch.float16)
AUTOCAST: Rule[torch.dtype | None] = Rule(
    "torch.bfloat16 or torch.float16",
    lambda value: isinstance(value, torch.dtype) and value in _KINDS,
    lambda value: value,
    "give one of them, or leave it out for the model's own types",
).optional


def check_version_dtype(dtype: torch.dtype | None, autocast: torch.dtype | None) -> None:
    """Raises `PenstockError` if weights are to be held in a type that the model does not compute in."""
    if dtype is not None and dtype != autocast:
        raise PenstockError(
            f"version_dtype=: expected the same type as autocast=, {autocast!r}, since operators need weights and "
            f"inputs of one type, found {text_of(dtype)}: pass both, or leave version_dtype= out"
        )


def autocasting(autocast: torch.dtype | None, device: torch.device) -> AbstractContextManager[None]:
    """The context that a forward on `device` computes in."""
    return nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast)


def _optimizer_advice(value: object) -> str:
    """What to do about an ``optimizer=`` that is no function of the parameters."""
    example = "such as lambda params: torch.optim.SGD(params, lr=0.1)"
    if isinstance(value, torch.optim.Optimizer):
        return f"pass a function that makes it of the parameters of each process, {example}, not the optimizer itself"
    return f"pass a function of the list of parameters, {example}"


def _loss_advice(value: object) -> str:
    """What to do about a ``loss_fn=`` that is no function of output and target."""
    if isinstance(value, type):
        return f"make one of the class: {value.__name__}()"
    return (
        "pass one such as torch.nn.functional.cross_entropy, or penstock.model_loss if the model computes its loss "
        "itself"
    )


_RULES: Mapping[str, Rule[Any]] = {
    "loss_fn": function(("output", "target"), _loss_advice),
    "optimizer": function(("parameters",), _optimizer_advice, classes=True),
    "autocast": AUTOCAST,
    "version_dtype": instance(torch.dtype, "a type", "give that of autocast=, or leave it out").optional,
    "clip_grad_norm": number(above=0).but("give the largest norm that gradients may have, such as 1.0").optional,
    "lr_scheduler": function(
        ("optimizer",),
        "pass a function that makes a scheduler, such as lambda optimizer: StepLR(optimizer, step_size=100)",
        classes=True,
    ).optional,
    "on_nonfinite": choice(get_args(OnNonfinite)),
    "loss_weight": function(
        ("target",), "pass a function that counts, such as lambda target: (target != -100).sum()"
    ).optional,
}


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
    loss_weight: LossWeight | None = None
    version_dtype: torch.dtype | None = None
    update_hooks: Sequence[UpdateHook] | UpdateHook = ()
    on_nonfinite: OnNonfinite = "raise"
    wire_dtype: WireDtype | None = None

    def __post_init__(self) -> None:
        check_fields(self, _RULES)
        read_loss_scale(self.loss_scale)
        check_version_dtype(self.version_dtype, self.autocast)
        read_hooks(self.update_hooks)
        read_wire_dtype(self.wire_dtype)

    @property
    def hooks(self) -> tuple[UpdateHook, ...]:
        """`update_hooks`, in order."""
        return read_hooks(self.update_hooks)

    @property
    def codec(self) -> WireCodec | None:
        """What `wire_dtype` asks for."""
        return read_wire_dtype(self.wire_dtype)

    @property
    def scaling(self) -> LossScale | None:
        """The rule that `loss_scale` asks for, or that skips updates without it."""
        skips = self.loss_scale is None and self.on_nonfinite != "raise"
        return SKIPPING if skips else read_loss_scale(self.loss_scale)

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
