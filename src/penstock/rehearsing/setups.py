"""Fresh copies of a training: the model, its functions, batches and random numbers; and a first look at one of them."""

import copy
import inspect
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from penstock.arguments import text_of
from penstock.capturing.model_kinds import check_model
from penstock.capturing.module_copies import copied
from penstock.capturing.preservation import generator_states
from penstock.errors import PenstockError
from penstock.pipeline import Pipeline
from penstock.rehearsing.training_records import TrainingRecord
from penstock.rehearsing.trainings import Batch, as_module, compute_gradients
from penstock.torch_internals.dispatch import OperatorMode
from penstock.torch_internals.pytrees import tree_leaves, tree_map_only
from penstock.training.losses import model_loss
from penstock.training.user_microbatches import Microbatches

_OWNED = ("loss_fn", "optimizer", "lr_scheduler", "loss_weight", "update_hooks")
"""Arguments that may hold the model or state of their own, and are copied with it."""
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """A training that can be begun any number of times."""

    make: Callable[[], Mapping[str, Any]]
    """Makes the arguments of `Pipeline`, and maybe batches."""
    batches: tuple[Batch, ...]
    remade: bool
    """Whether a function of the user's makes them; otherwise they are deep copies."""
    drops: bool
    """Whether there is dropout, which fresh copies do without."""
    widened: bool = False
    """Whether the copies are float64."""

    def fresh(self, shaken: float = 0.0) -> dict[str, Any]:
        """The arguments of a training that is about to begin: its weights times 1 + `shaken` or 1 - `shaken`."""
        _seed(0)
        given = {name: value for name, value in self.make().items() if name != "batches"}
        module = as_module(given["model"])
        if self.widened:
            module.double()
            given["sample"] = _widen(given["sample"])
            if isinstance(given["loss_fn"], nn.Module):
                given["loss_fn"].double()
        for inner, name in _dropout_rates(module):
            setattr(inner, name, 0.0)
        with torch.no_grad():
            for parameter in module.parameters() if shaken else ():
                if parameter.is_floating_point():
                    parameter.mul_(1 + shaken * torch.randn_like(parameter).sign())
        _seed(1)
        return given

    def in_float64(self) -> "Setup":
        """The same with copies in float64."""
        return replace(self, batches=_widen(self.batches), widened=True)


def read_setup(model: Any, batches: Any, steps: int, arguments: Mapping[str, Any]) -> Setup:
    """The training that was passed to `rehearse`. Raises `PenstockError` unless it is whole."""
    remade = callable(model) and not isinstance(model, nn.Module | type)

    def make() -> dict[str, Any]:
        given = {**arguments, "model": model}
        if remade:
            made = model()
            return {**given, **(made if isinstance(made, Mapping) else {"model": made})}
        memo: dict[int, Any] = {}
        try:
            own: dict[str, Any] = {"model": copied(model, memo)}
            return given | own | {name: copy.deepcopy(given[name], memo) for name in _OWNED if name in given}
        except Exception as error:
            fix = "pass a function that makes the model, and returns all arguments in a dict"
            raise PenstockError(f"rehearse: copying the model fails with {error!r}: {fix}") from error

    _seed(0)
    first = make()
    check_model(first["model"], "rehearse")
    found: Any = batches if batches is not None else first.get("batches")
    _check_names(first, found)
    own_target = first["loss_fn"] is model_loss
    kept = tuple(_pair(batch, own_target) for batch in islice(found, steps))
    if not kept:
        raise PenstockError("rehearse(batches=): expected at least one batch, found none: pass what a step takes")

    return Setup(make, kept, remade, drops=bool(_dropout_rates(as_module(first["model"]))))


def _check_names(given: Mapping[str, Any], batches: Any) -> None:
    known = inspect.signature(Pipeline).parameters
    wrong = [f"an argument of Pipeline, found {name}=" for name in given if name not in (*known, "batches")]
    wrong += [f"{name}=" for name in ("sample", "loss_fn", "optimizer") if name not in given]
    if not isinstance(batches, Iterable) or isinstance(batches, str | Mapping | Tensor):
        wrong.append(f"batches, found {text_of(batches)}")
    if wrong:
        raise PenstockError(
            f"rehearse: expected {wrong[0]}: pass rehearse(model, batches, sample=..., loss_fn=..., optimizer=...), "
            "with the arguments of Pipeline, and pairs (inputs, target) as batches; or a function that returns all in "
            "a dict"
        )


def _pair(batch: Any, own_target: bool) -> Batch:
    if isinstance(batch, Microbatches) or (own_target and not (isinstance(batch, tuple) and batch[1:] == (None,))):
        return batch, None
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise PenstockError(
            f"rehearse(batches=): expected pairs (inputs, target), found {text_of(batch)}: give what pipe.step takes"
        )
    return batch[0], batch[1]


def _widen(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, tree)


def _dropout_rates(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The attributes of modules in `model` that are rates of dropout above 0."""
    return [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and value
        if "drop" in name.lower() or (name == "p" and isinstance(module, _DROPOUT))
    ]


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What a step without an update shows of a training."""

    eps: float
    """The distance of 1 to the next number in the coarsest type that it computes in."""
    draws: bool
    """Whether it draws random numbers, dropout aside."""


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
    module, record = as_module(given["model"]), TrainingRecord()
    before, coarsest = generator_states(), _CoarsestType()  # type: ignore[no-untyped-call]
    with coarsest:
        compute_gradients(given, setup.batches[0], 0, record)
    loss = record.values[0, "loss", ""]
    if not math.isfinite(loss):
        raise PenstockError(
            f"rehearse: expected a loss that is a number, found {loss} in the first step of your own loop: rehearse "
            "with batches and weights that train"
        )
    if not setup.remade and not record.read_by_loss <= {id(parameter) for parameter in module.parameters()}:
        raise PenstockError(
            "rehearse: expected a loss that trains only the copy of the model, found that loss_fn reads a trained "
            "tensor outside of it: pass a function that makes model and loss_fn and returns all arguments in a dict, "
            "since a rehearsal trains each time anew. What the loss itself learns must be part of the model"
        )
    return FirstLook(coarsest.eps, before != generator_states())
