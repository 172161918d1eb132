"""Whether a state is one of this training: compared as a whole, before anything is changed.

Each check raises `CheckpointError`, which names the part of the state, what was expected and what was found.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from penstock.arguments import SEED, Rule, integer, is_count, is_number, text_of
from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.manifests import StoredTensor, digest_of, read_value
from penstock.runtime.checkpoints.training_state import PARTS, State, TrainingState
from penstock.runtime.parameters.shards import whole
from penstock.torch_internals.subclasses import TensorParts, form_of

_SAME = "Load the state of the same model, with the same optimizers"
_COUNT = integer(0, 2**53)
_PAST = re.compile(r"0|-\d+", re.ASCII)
_UPDATES = integer(0, 10**8)
"""A scheduler is turned as often, so that a number of more digits would keep it for hours."""


def check_state(training: TrainingState, state: object) -> None:
    """Raises `CheckpointError` unless `state` is one of `training`, whole or of this process at least."""
    model, optimizer, pipeline = (_part(state, name) for name in ("model", "optimizer", "pipeline"))
    base = _mapping(_mapping(state, "the whole").get("base", {}), "base")
    _check_model(training, model, base)
    _check_base(training, base)
    _check_optimizers(training, optimizer, exact="history" not in _mapping(state, "the whole"))
    _check_loss(training, _mapping(state, "the whole"))
    _check_progress(training, pipeline)
    _check_hooks(training, optimizer)
    _check_history(_mapping(state, "the whole"), training.trained(), training.run)


def _check_base(training: TrainingState, base: State) -> None:
    own: dict[str, Any] = {**training.held, **training.entries.collect()}
    here = [name for name in base if name in own or training.entries.is_here(name)]
    found = [name for name in here if name not in own or digest_of(whole(own[name])) != base[name]]
    if found:
        raise CheckpointError(
            f"{', '.join(found[:5])}{f' and {len(found) - 5} more' if found[5:] else ''}: expected the frozen "
            "weights that the checkpoint was saved beside, of which it has digests only, found other numbers. Load "
            "the same files, and quantize them as then; a file or a memory may be damaged"
        )


def _check_model(training: TrainingState, model: State, base: State) -> None:
    known, present = training.entries.tensors, training.entries.collect()
    for name, value in model.items():
        if name not in known and name not in present and not training.entries.takes(name):
            raise CheckpointError(
                f"the state dict has {name!r}, which the model has not: it is of another model, or of a larger "
                f"one. {_SAME}"
            )
        if name in known - present.keys() and not isinstance(value, Tensor | StoredTensor | TensorParts):
            raise CheckpointError(
                f"{name}: expected a torch.Tensor in the state dict, found {type(value).__qualname__}. {_SAME}"
            )
    for name in (*training.held, *present):
        if name not in model and name not in base:
            raise CheckpointError(
                f"the state dict has no {name!r}, which this rank holds: load the state of the same model, whole "
                "or of all ranks together"
            )
    for name, tensor in training.held.items():
        found, expected = ("", "") if name in present or name in base else (form_of(model[name]), form_of(tensor))
        if found != expected:
            raise CheckpointError(
                f"{name} has shape and type {found} in the state dict and {expected} in the model: expected the "
                "same, since a conversion changes the numbers. Load the state of the same model, or convert the "
                "model before the pipeline is built"
            )


def _check_loss(training: TrainingState, state: State) -> None:
    found = "/loss_fn" in _mapping(state.get("beside", {}), "beside")
    if training.computes_loss and "beside" in state and found != ("/loss_fn" in training.beside()):
        states = ("none", "one") if found else ("one", "none")
        raise CheckpointError("loss_fn: expected {} with a state, as here, found {}. Pass that of then".format(*states))


def _check_optimizers(training: TrainingState, saved: State, exact: bool) -> None:
    state, options, classes = (_mapping(saved.get(part, {}), part) for part in ("state", "options", "classes"))
    for optimizer, own in zip(training.optimizers, training.classes, strict=True):
        first: dict[int, str] = {}
        for group, name, parameter in training.grouped(optimizer):
            if name not in options or name not in classes:
                raise CheckpointError(
                    f"the optimizer's state has no {name!r}, which this rank trains: load the state of all ranks "
                    "together"
                )
            if list(classes[name]) != own:
                raise CheckpointError(
                    f"{name}: expected the state of the optimizer and the learning-rate scheduler {own}, found "
                    f"that of {list(classes[name])}. {_SAME} and schedulers, or take the weights only: "
                    "load_weights reads those of a checkpoint"
                )
            given = _mapping(options[name], f"optimizer.options.{name}")
            if "params" in given:
                raise CheckpointError(f"the options of {name} have 'params', which is none. {_SAME}")
            other = first.setdefault(id(group), name)
            pairs = ((key, read_value(given[key]), read_value(options[other].get(key))) for key in given)
            differing = [key for key, one, another in pairs if exact and one != another]
            if differing:
                raise CheckpointError(
                    f"{other} and {name} are in one parameter group here and had another {differing[0]!r} each in "
                    f"the state: expected groups of parameters that had the same options. {_SAME} and groups"
                )
            own_state = _mapping(state.get(name, {}), f"optimizer.state.{name}")
            if own_state and type(optimizer).__module__.startswith("torch.optim"):
                _check_shapes(name, own_state, parameter)
                _check_keys(name, own_state, given, parameter, optimizer)


def _check_hooks(training: TrainingState, saved: State) -> None:
    places = {str(number) for number in range(len(training.updater.hooks.hooks))}
    for name, kept in _part(saved, "hooks").items():
        for key in _mapping(kept, f"optimizer.hooks.{name}"):
            if str(key).partition(".")[0] not in places:
                raise CheckpointError(
                    f"the state of the hooks of {name} has {key!r}: expected a number below {len(places)}, that "
                    f"of a hook, before a point. {_SAME}"
                )


def _check_progress(training: TrainingState, saved: State) -> None:
    rules: dict[str, Rule[Any]] = {"steps": _COUNT, "microbatches": _COUNT, "seed": SEED.optional}
    if any(training.updater.scheduler_names):
        rules["updates"] = _UPDATES
    for name, rule in rules.items():
        if not rule.accepts(found := saved.get(name, "nothing")):
            _refuse(f"{name} in the part 'pipeline'", rule.expected, found)
    hooks = saved.get("hooks")
    if not isinstance(hooks, Sequence) or list(hooks) != training.hook_names:
        raise CheckpointError(
            f"the state is of a training with the update hooks {hooks}: expected {training.hook_names}, those of this "
            "pipeline, in the same order, since each takes over its own state. Pass the same update_hooks="
        )
    scale = saved.get("loss_scale")
    if scale is not None and not training.engine.scales.used:
        raise CheckpointError(
            "the state is of a training with loss_scale=, and this pipeline has none: expected the same. Pass the "
            "same loss_scale="
        )
    numbers: list[Any] = [scale.get(key) for key in ("scale", "good")] if isinstance(scale, Mapping) else [None]
    valid = all(is_number(value) and value >= 0 for value in numbers)
    if not valid and (scale is not None or training.engine.scales.state()):
        _refuse("loss_scale in the part 'pipeline'", "the scale of the loss and the updates without overflow", scale)


def _check_history(state: Mapping[str, Any], parameters: Mapping[str, Tensor], run: str) -> None:
    """Raises `CheckpointError` unless the history in `state`, if it is of the same `run`, is whole and fits."""
    history = state.get("history")
    if history is None:
        return
    parts = [history, *(history.get(part, {}) for part in PARTS)] if isinstance(history, Mapping) else [history]
    if not all(isinstance(part, Mapping) for part in parts) or not isinstance(state["pipeline"].get("run"), str):
        _refuse("history", "what Pipeline.save(...) wrote", history)
    if state["pipeline"]["run"] != run:
        return
    weights = history.get("weights", {})
    for name in weights.keys() & parameters.keys():
        shape = parameters[name].shape
        for version, tensor in weights[name].items():
            if not (isinstance(tensor, Tensor | StoredTensor) and tensor.shape == shape and _PAST.fullmatch(version)):
                _refuse(f"history/weights/{name}", f"tensors of the shape {tuple(shape)}", weights[name])
    for stage, kept in history.get("stages", {}).items():
        # Older checkpoints have norms of gradients, too.
        if not isinstance(kept, Mapping) or not is_count(kept.get("updates"), 0):
            _refuse(f"history/stages/{stage}", "the updates of a stage", kept)


def _refuse(name: str, expected: str, found: object) -> NoReturn:
    raise CheckpointError(
        f"{name} of the state: expected {expected}, found {found!r:.80}. Load what Pipeline.state_dict() returned, or "
        "a checkpoint of Pipeline.save(...), without changes"
    )


def _check_shapes(name: str, state: State, parameter: Tensor) -> None:
    """PyTorch's own optimizers keep tensors as large as the parameter, or that extend to it."""
    for key, value in state.items():
        if isinstance(value, Tensor | StoredTensor) and value.shape.numel() != 1:
            pairs = zip(reversed(value.shape), reversed(parameter.shape), strict=False)
            if len(value.shape) > parameter.ndim or any(size not in (1, full) for size, full in pairs):
                raise CheckpointError(
                    f"the optimizer's state has {key!r} of {name} with the shape {tuple(value.shape)}: expected "
                    f"{tuple(parameter.shape)}, that of the parameter. {_SAME}"
                )


def _check_keys(name: str, state: State, options: State, parameter: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """What one of PyTorch's own optimizers keeps of a parameter is found by a step of another one."""
    small = nn.Parameter(torch.zeros((1,) * parameter.ndim))
    small.grad = torch.zeros_like(small)
    takes = inspect.signature(type(optimizer)).parameters
    try:
        other = type(optimizer)([small], **{key: value for key, value in options.items() if key in takes})
        other.step()
    except Exception:
        # It needs a closure, a device or sparse gradients.
        return
    for key, expected in other.state[small].items():
        found = state.get(key, "nothing")
        tensor = isinstance(found, Tensor | StoredTensor | TensorParts)
        if not (tensor or found is None or (is_number(found) and (key == "step" or not isinstance(expected, Tensor)))):
            raise CheckpointError(
                f"the optimizer's state of {name}: expected {key!r} of the type {type(expected).__name__}, found "
                f"{text_of(found)}. {_SAME}"
            )


def _part(state: object, name: str) -> State:
    found = _mapping(state, "the whole")
    if name not in found:
        raise CheckpointError(
            f"the state dict has no part {name!r}: expected what Pipeline.state_dict() returns, found {sorted(found)}. "
            "Load the whole of it"
        )
    return _mapping(found[name], name)


def _mapping(value: object, name: str) -> State:
    if not isinstance(value, Mapping):
        _refuse(name, "a dict", value)
    return value
