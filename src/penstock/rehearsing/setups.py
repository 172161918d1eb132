"""Fresh copies of a training: the model with the functions that belong to it, its batches, and its random numbers."""

import copy
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
from penstock.errors import PenstockError
from penstock.rehearsing.trainings import Batch, as_module
from penstock.torch_internals.pytrees import tree_map_only
from penstock.training.losses import model_loss
from penstock.training.user_microbatches import Microbatches

_OWNED = ("loss_fn", "optimizer", "lr_scheduler", "loss_weight", "update_hooks")
"""Arguments that may hold the model or state of their own, and are copied with it."""
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """A training that can be begun any number of times."""

    make: Callable[[], Mapping[str, Any]]
    """Makes the arguments of `Pipeline`."""
    batches: tuple[Batch, ...]
    remade: bool
    """Whether a function of the user's makes them; otherwise they are deep copies."""
    widened: bool = False
    """Whether the copies are float64."""

    def fresh(self, shaken: float = 0.0) -> dict[str, Any]:
        """The arguments of a training that is about to begin: its weights times 1 + `shaken` or 1 - `shaken`."""
        _seed(0)
        given = dict(self.make())
        module = as_module(given["model"])
        if self.widened:
            module.double()
            given["sample"] = _widen(given["sample"])
            if isinstance(given["loss_fn"], nn.Module):
                given["loss_fn"].double()
        for inner, name in dropout_rates(module):
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
    makes = callable(model) and not isinstance(model, nn.Module | type)
    given = {**arguments, "model": model}

    def make() -> dict[str, Any]:
        if makes:
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
    missing = [name for name in ("model", "sample", "loss_fn", "optimizer") if name not in first]
    found = batches if batches is not None else first.pop("batches", None)
    if missing or not isinstance(found, Iterable) or isinstance(found, str | Mapping | Tensor):
        wanted = f"{missing[0]}=" if missing else f"batches, found {text_of(found)}"
        raise PenstockError(
            f"rehearse: expected {wanted}: pass rehearse(model, batches, sample=..., loss_fn=..., optimizer=...), with "
            "the arguments of Pipeline, and pairs (inputs, target) as batches; or a function that returns all in a dict"
        )
    kept = tuple(_pair(batch, first["loss_fn"] is model_loss) for batch in islice(found, steps))
    if not kept:
        raise PenstockError("rehearse(batches=): expected at least one batch, found none: pass what a step takes")

    def make_arguments() -> dict[str, Any]:
        return {name: value for name, value in make().items() if name not in ("batches", "resume")}

    return Setup(make_arguments, kept, remade=makes)


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


def dropout_rates(model: nn.Module) -> list[tuple[nn.Module, str]]:
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
