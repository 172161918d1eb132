"""A first look at a training: one forward and loss of the first batch, before anything is trained."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.capturing.preservation import generator_states
from penstock.errors import PenstockError
from penstock.rehearsing.setups import Setup
from penstock.rehearsing.trainings import as_module, forwards
from penstock.torch_internals.autograd import leaves_behind
from penstock.torch_internals.dispatch import OperatorMode
from penstock.torch_internals.pytrees import tree_leaves


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What a forward shows of a training."""

    eps: float
    """The distance of 1 to the next number in the coarsest type that it computes in."""
    dtype: torch.dtype
    """Of the loss."""
    draws: bool
    """Whether it draws random numbers, dropout aside."""
    loss_reads: bool
    """Whether the loss reads parameters beside the output."""


class _CoarsestType(OperatorMode):  # type: ignore[no-untyped-call]
    """Finds the coarsest type that operators compute in: models may cast to float32 inside."""

    eps = 0.0

    def seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = func(*args, **kwargs)
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return found


def look(setup: Setup) -> FirstLook:
    """Raises `PenstockError` if the loss is not finite, or reads what copies of the model do not hold."""
    given = {**setup.fresh(), "microbatches": 1}
    module = as_module(given["model"])
    before, coarsest = generator_states([module]), _CoarsestType()  # type: ignore[no-untyped-call]
    with coarsest:
        forward = next(forwards(given, setup.batches[0]))
    if not bool(forward.loss.isfinite()):
        raise PenstockError(
            f"rehearse: expected a loss that is a number, found {float(forward.loss)} in the first step of your own "
            "loop: rehearse with batches and weights that train"
        )
    read = {id(leaf) for leaf in leaves_behind(forward.loss, forward.ends)}
    if not setup.remade and not read <= {id(parameter) for parameter in module.parameters()}:
        raise PenstockError(
            "rehearse: expected a loss that trains only the copy of the model, found that loss_fn reads a trained "
            "tensor outside of it: pass a function that makes model and loss_fn and returns all arguments in a dict, "
            "since a rehearsal trains each time anew. What the loss itself learns must be part of the model"
        )
    return FirstLook(coarsest.eps, forward.loss.dtype, before != generator_states([module]), bool(read))
