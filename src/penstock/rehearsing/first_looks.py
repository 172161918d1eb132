"""A first look at a training: one forward and loss of the first batch, before anything is trained."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.capturing.preservation import generator_states
from penstock.capturing.samples import flatten, read_sample
from penstock.errors import PenstockError
from penstock.oracle.batches import cut
from penstock.rehearsing.setups import Setup
from penstock.rehearsing.trainings import as_module, call_model, recipe_of
from penstock.torch_internals.autograd import leaves_behind
from penstock.torch_internals.dispatch import TorchDispatchMode
from penstock.torch_internals.modules import is_batch_norm
from penstock.torch_internals.pytrees import tree_leaves
from penstock.training.losses import compute_loss
from penstock.training.precisions import first_device


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What a forward shows of a training."""

    eps: float
    """The distance of 1 to the next number in the coarsest type that it computes in."""
    dtype: torch.dtype
    """Of the loss."""
    samples: int
    """In the first batch; in its first microbatch, if the user cuts it."""
    draws: bool
    """Whether it draws random numbers, dropout aside."""
    read_by_loss: tuple[str, ...]
    """The parameters that the loss reads beside the output."""
    batch_norms: bool


class _Precision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the coarsest type that operators compute in."""

    eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return found


def look(setup: Setup) -> FirstLook:
    """Raises `PenstockError` if the loss is not finite, or trains something that no optimizer has."""
    given = setup.fresh()
    recipe, model = recipe_of(given), given["model"]
    _, spec = read_sample(given["sample"])
    inputs, target = setup.batches[0]
    piece = cut(spec, inputs, target, 1, own_target=recipe.reads_model_loss)[0]
    before, precision = generator_states(), _Precision()  # type: ignore[no-untyped-call]
    with precision, recipe.autocast_context(first_device(model)):
        output = call_model(model, spec, piece.values)
        kept = {leaf.grad_fn for leaf in flatten(output)[0] if isinstance(leaf, Tensor)}
        loss, _ = compute_loss(recipe.loss_fn, output, piece.target)
    if not bool(loss.isfinite()):
        raise PenstockError(
            f"rehearse: expected a loss that is a number, found {float(loss)} in the first step of your own loop: "
            "rehearse with batches and weights that train"
        )
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    names = {id(parameter): name for name, parameter in as_module(model).named_parameters()}
    leaves = list(leaves_behind(loss, kept))
    for leaf in leaves:
        if id(leaf) not in names:
            raise PenstockError(
                f"rehearse: loss_fn reads a trained tensor of shape {tuple(leaf.shape)} that is no parameter of the "
                f"model{'' if setup.remade else ' that trains, a copy'}. If it is one of the loss, no optimizer steps "
                "it: make it part of the model. If it is one of the model: pass a function that makes model and "
                "loss_fn and returns all arguments in a dict, since a rehearsal trains each time anew"
            )
    return FirstLook(
        eps=precision.eps,
        dtype=loss.dtype,
        draws=before != generator_states(),
        samples=piece.size,
        read_by_loss=tuple(names[id(leaf)] for leaf in leaves),
        batch_norms=any(is_batch_norm(inner) and inner.training for inner in as_module(model).modules()),
    )
