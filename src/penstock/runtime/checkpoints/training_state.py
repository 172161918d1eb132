"""The state of a training under the model's own names, so that it fits any number of stages.

The optimizer's state and options are kept by parameter name, not by position: positions depend on the plan. A state
also says what it is the state of (classes of optimizers, schedulers and hooks), so that another training can refuse it.

Under a schedule without a flush a checkpoint may be saved without a drain. The microbatches in flight are not saved:
the run that goes on computes them again, with the older versions of the weights that they read. These are in its
*history*, with what else crosses the cut: norms of gradients, the scales of losses, and the buffers of replicas, each
of which has seen other microbatches. A history fits the plan and the schedule that it was made under. Under others the
training goes on from the newest weights, as after a drain.

Laws of this file:
  1. A state is compared with the training as a whole before anything is changed.
  2. Tensors of a checkpoint are read one after the other, each to its place.
"""

import copy
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from penstock.arguments import SEED, integer, is_count, is_number, text_of
from penstock.capturing.chain import LayerChain
from penstock.errors import CheckpointError
from penstock.runtime.assembly.weight_exports import held_tensors
from penstock.runtime.checkpoints.manifests import StoredTensor, read_value
from penstock.runtime.engine.engine import Engine
from penstock.runtime.parameters.host_states import in_parts
from penstock.runtime.parameters.optimizer_steps import Updater
from penstock.runtime.parameters.shards import assign, distributed_like, whole
from penstock.scheduling.schedules import Schedule
from penstock.torch_internals import pytrees as pytree
from penstock.training.recipes import Recipe
from penstock.values.plan_stages import Stage
from penstock.values.plans import Plan

State: TypeAlias = Mapping[str, Any]
History: TypeAlias = Mapping[str, Any]

PARTS = ("weights", "stages", "buffers")
"""Weights by name and version; counts, norms and scales by stage; buffers by stage, replica and number."""
_SAME = "Load the state of the same model, with the same optimizers"
_COUNT = integer(0, 2**53)
_UPDATES = integer(0, 10**8)
"""A scheduler is turned as often, so that a number of more digits would keep it for hours."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """The training of this process: what its state is made of, and restored to."""

    chain: LayerChain
    stages: Sequence[Stage]
    """The stages of this process."""
    trained: Callable[[], dict[str, nn.Parameter]]
    """Returns the parameters of this process, by name."""
    updater: Updater
    engine: Engine
    run: str
    """What decides which versions of the weights are read: see `describe_run`."""
    rank: int
    """The number of this process."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers of this process."""
        return self.updater.optimizers

    @property
    def held(self) -> dict[str, Tensor]:
        """The entries of the model's state dict that belong to this process's stages."""
        return held_tensors(self.chain, self.stages)

    def collect(self, take: Callable[[Any], Any] = whole) -> dict[str, Any]:
        """``{"model": ..., "optimizer": ..., "pipeline": ...}``; ``take(value)`` is what is kept of a value."""
        engine, updater = self.engine, self.updater
        return {
            "model": {name: take(tensor.detach()) for name, tensor in self.held.items()},
            "optimizer": self.named(take),
            "pipeline": {**self.progress, **updater.state(), **engine.scale_state()},
        }

    def copied(self) -> dict[str, Any]:
        """The same with copies of all tensors, on their devices. Tied weights share memory in it, too."""
        # A schedule with several versions writes later ones into the same memory, out of turn.
        return copy.deepcopy(self.collect())

    @property
    def progress(self) -> dict[str, Any]:
        """The part ``pipeline`` of the state, as far as it belongs to no stage."""
        engine = self.engine
        return {
            "steps": engine.steps,
            "microbatches": engine.trained,
            "seed": engine.seed,
            "hooks": self.hook_names,
        }

    @property
    def hook_names(self) -> list[str]:
        """The classes of the update hooks, in their order."""
        return [type(hook).__qualname__ for hook in self.updater.hooks.hooks]

    def check(self, state: object) -> None:
        """Raises `CheckpointError` unless `state` is one of this training, whole or of this process at least."""
        model, optimizer, pipeline = (_part(state, name) for name in ("model", "optimizer", "pipeline"))
        self._check_model(model)
        self._check_optimizers(optimizer)
        self._check_progress(pipeline)
        self._check_hooks(optimizer)
        _check_history(_mapping(state, "state"), self.trained(), self.run)

    def restore(self, state: State) -> None:
        """Takes over `state`, which `check` has accepted."""
        for optimizer in self.optimizers:
            # The old state goes first, so that there is one in memory.
            optimizer.state = defaultdict(dict)
            self._restore_optimizer(optimizer, state["optimizer"])
        self._restore_hooks(state["optimizer"]["hooks"])
        with torch.no_grad():
            for name, tensor in self.held.items():
                assign(tensor, read_value(state["model"][name]))
        progress, engine = state["pipeline"], self.engine
        history = _open_history(state, self.run, self.rank)
        updates = {} if history is None else {int(stage): kept["updates"] for stage, kept in history["stages"].items()}
        self.updater.load_state(progress, updates, exact=history is not None or "history" not in state)
        engine.load_scale(progress)
        engine.seed, engine.steps = progress["seed"], progress["steps"]
        engine.resume(progress["microbatches"], history)

    def named(self, take: Callable[[Any], Any], of: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
        """By parameter: the state and options of its optimizer, the classes of optimizer and scheduler, and what the
        hooks keep, by their number. `of`: the names of some parameters, by default all.
        """
        result: dict[str, dict[str, Any]] = {"state": {}, "options": {}, "classes": {}, "hooks": {}}
        for optimizer, classes in zip(self.optimizers, self._classes, strict=True):
            for group, name, parameter in self._grouped(optimizer):
                if of is not None and name not in of:
                    continue
                result["options"][name] = {key: value for key, value in group.items() if key != "params"}
                result["classes"][name] = classes
                if parameter in optimizer.state:
                    result["state"][name] = {key: take(value) for key, value in optimizer.state[parameter].items()}
        for number, states in enumerate(self.updater.hooks.states):
            for name, kept in states.items():
                if kept and (of is None or name in of):
                    named = {f"{number}.{key}": take(value) for key, value in kept.items()}
                    result["hooks"].setdefault(name, {}).update(named)
        return result

    @property
    def _classes(self) -> list[list[str | None]]:
        """By optimizer, its class and that of its scheduler."""
        schedulers = self.updater.scheduler_names
        return [[type(one).__qualname__, name] for one, name in zip(self.optimizers, schedulers, strict=True)]

    def _grouped(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
        """Group, name and parameter, in the order of the optimizer. `CheckpointError` for one of another model."""
        names = {id(parameter): name for name, parameter in self.trained().items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise CheckpointError(
                        f"{type(optimizer).__qualname__}: expected groups of the parameters that this process trains, "
                        f"those of pipe.parameters(), found another one of shape {tuple(parameter.shape)}. It has no "
                        "gradient and no name in a checkpoint. Take it out, or make it part of the model before the "
                        "pipeline is built"
                    )
                yield group, names[id(parameter)], parameter

    def _check_model(self, model: State) -> None:
        known = self.chain.parameters.keys() | self.chain.buffers.keys()
        for name, value in model.items():
            if name not in known:
                raise CheckpointError(
                    f"the state dict has {name!r}, which the model has not: it is of another model, or of a larger "
                    f"one. {_SAME}"
                )
            if not isinstance(value, Tensor | StoredTensor):
                raise CheckpointError(
                    f"{name}: expected a torch.Tensor in the state dict, found {type(value).__qualname__}. {_SAME}"
                )
        for name, tensor in self.held.items():
            if name not in model:
                raise CheckpointError(
                    f"the state dict has no {name!r}, which this rank holds: load the state of the same model, whole "
                    "or of all ranks together"
                )
            if model[name].shape != tensor.shape:
                raise CheckpointError(
                    f"{name} has shape {tuple(model[name].shape)} in the state dict and {tuple(tensor.shape)} in the "
                    "model: load the state of the same model"
                )
            if model[name].dtype != tensor.dtype:
                raise CheckpointError(
                    f"{name} is {model[name].dtype} in the state dict and {tensor.dtype} in the model: expected the "
                    "same, since a conversion changes the numbers. Convert the model before the pipeline is built, or "
                    "the state"
                )

    def _check_optimizers(self, saved: State) -> None:
        state, options, classes = (_entries(saved, part) for part in ("state", "options", "classes"))
        for optimizer, own in zip(self.optimizers, self._classes, strict=True):
            for _, name, parameter in self._grouped(optimizer):
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
                own_state = _mapping(state.get(name, {}), f"optimizer.state.{name}")
                if own_state and type(optimizer).__module__.startswith("torch.optim"):
                    _check_shapes(name, own_state, parameter)
                    _check_keys(name, own_state, given, parameter, optimizer)

    def _check_hooks(self, saved: State) -> None:
        places = {str(number) for number in range(len(self.updater.hooks.hooks))}
        for name, kept in _entries(saved, "hooks").items():
            for key in _mapping(kept, f"optimizer.hooks.{name}"):
                if str(key).partition(".")[0] not in places:
                    raise CheckpointError(
                        f"the state of the hooks of {name} has {key!r}: expected a number below {len(places)}, that "
                        f"of a hook, before a point. {_SAME}"
                    )

    def _check_progress(self, saved: State) -> None:
        for name in ("steps", "microbatches"):
            if not _COUNT.accepts(saved.get(name)):
                _refuse(f"{name} in the part 'pipeline'", _COUNT.expected, saved.get(name))
        if not SEED.optional.accepts(saved.get("seed", "nothing")):
            _refuse("seed in the part 'pipeline'", f"{SEED.expected}, or None", saved.get("seed", "nothing"))
        hooks = saved.get("hooks")
        if not isinstance(hooks, Sequence) or list(hooks) != self.hook_names:
            raise CheckpointError(
                f"the state is of a training with the update hooks {hooks}: expected {self.hook_names}, those of this "
                "pipeline, in the same order, since each takes over its own state. Pass the same update_hooks="
            )
        if any(self.updater.scheduler_names) and not _UPDATES.accepts(saved.get("updates")):
            expected = f"{_UPDATES.expected}, those that the learning-rate scheduler has seen"
            _refuse("updates in the part 'pipeline'", expected, saved.get("updates"))
        scale = saved.get("loss_scale")
        if scale is not None and not self.engine.scales_loss:
            raise CheckpointError(
                "the state is of a training with loss_scale=, and this pipeline has none: expected the same. Pass the "
                "same loss_scale="
            )
        numbers: list[Any] = [scale.get(key) for key in ("scale", "good")] if isinstance(scale, Mapping) else [None]
        valid = all(is_number(value) and value >= 0 for value in numbers)
        if not valid and (scale is not None or self.engine.scale_state()):
            _refuse(
                "loss_scale in the part 'pipeline'", "the scale of the loss and the updates without overflow", scale
            )

    def _restore_optimizer(self, optimizer: torch.optim.Optimizer, saved: State) -> None:
        current, host = optimizer.state_dict(), self.updater.host
        described = dict(zip(map(id, optimizer.param_groups), current["param_groups"], strict=True))
        parameters: dict[tuple[int, str], nn.Parameter] = {}
        for place, (group, name, parameter) in enumerate(self._grouped(optimizer)):
            options = described[id(group)]
            for key, value in _copied(saved["options"][name], parameter, "lr").items():
                tensors = isinstance(value, Tensor) and isinstance(options.get(key), Tensor)
                options[key] = value.to(options[key].device) if tensors else value
            parameters[place, name] = parameter
        loaded: dict[Any, Any] = {}
        for part in [parameters] if host is None else in_parts(parameters):
            current["state"] = laid = {
                place: {key: _copied(value, parameter, key) for key, value in saved["state"][name].items()}
                for (place, name), parameter in part.items()
                if name in saved["state"]
            }
            # Through the optimizer's own loader, which moves the state to where this optimizer wants it.
            optimizer.load_state_dict(current)
            for (place, _), parameter in part.items():
                for key, value in laid.get(place, {}).items():
                    # The loader also casts to the type of the parameter, which would change the numbers.
                    if isinstance(value, Tensor) and value.dtype != optimizer.state[parameter][key].dtype:
                        optimizer.state[parameter][key] = value.to(optimizer.state[parameter][key].device)
            if host is not None:
                host.put_away(optimizer.state)
            loaded.update(optimizer.state)
        optimizer.state.update(loaded)

    def _restore_hooks(self, saved: State) -> None:
        hooks = self.updater.hooks
        hooks.states = [{} for _ in hooks.hooks]
        for name in self.trained().keys() & saved.keys():
            for place, value in saved[name].items():
                number, _, key = place.partition(".")
                kept = _copied(value, self.trained()[name], key)
                hooks.states[int(number)].setdefault(name, {})[key] = kept


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
        tensor = isinstance(found, Tensor | StoredTensor)
        if not (tensor or found is None or (is_number(found) and (key == "step" or not isinstance(expected, Tensor)))):
            raise CheckpointError(
                f"the optimizer's state of {name}: expected {key!r} of the type {type(expected).__name__}, found "
                f"{text_of(found)}. {_SAME}"
            )


def _copied(value: Any, parameter: nn.Parameter, key: str) -> Any:
    """`value`, read or copied, as the parameter is laid out; what is not element by element stays whole.

    A copy: the optimizer would go on in the caller's tensors. PyTorch keeps ``step`` where it was made.
    """

    def take(tensor: Any) -> Any:
        own = tensor.read() if isinstance(tensor, StoredTensor) else tensor.clone()
        if own.shape == parameter.shape:
            own = distributed_like(own, parameter)
        return own if key in ("step", "lr") else own.to(parameter.device)

    return pytree.tree_map_only((Tensor, StoredTensor), take, value)


def _part(state: object, name: str) -> State:
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"expected a state dict, what Pipeline.state_dict() returns, found {type(state).__qualname__}. Pass that"
        )
    if name not in state:
        raise CheckpointError(
            f"the state dict has no part {name!r}: expected what Pipeline.state_dict() returns, found {sorted(state)}"
        )
    return _mapping(state[name], name)


def _entries(saved: State, name: str) -> State:
    """A part of the optimizer's state; an empty one has no entry for any parameter, which is refused by its name."""
    if name == "hooks" and name not in saved:
        raise CheckpointError(
            "the optimizer's state has no part 'hooks': expected what Pipeline.state_dict() returns, which has one "
            "even if it is empty. Load the whole of it"
        )
    return _mapping(saved.get(name, {}), f"optimizer.{name}")


def _mapping(value: object, name: str) -> State:
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"the part {name!r} of the state dict is {value!r:.80}: expected a dict, as Pipeline.state_dict() returns "
            "it"
        )
    return value


def describe_run(plan: Plan, schedule: Schedule, recipe: Recipe) -> str:
    """All that decides which versions of which weights a run reads, in one line."""
    stages = " ".join(f"{stage.start}-{stage.stop}x{len(stage.ranks)}" for stage in plan.stages)
    sync = " with vertical sync" if plan.vertical_sync else ""
    text = f"{schedule.name}{sync}, layers {stages} ({plan.routing}), {plan.microbatches} microbatches"
    if recipe.version_dtype is not None:
        text += f", versions in {recipe.version_dtype}"
    if any(map(recipe.predicts, schedule.guarantees.delays)):
        text += ", predicted weights"
    return text + (", with norms" if recipe.needs_norms else "")


def _open_history(state: Mapping[str, Any], run: str, rank: int) -> History | None:
    """The history in `state`, read, if it is one of the same `run`. If it is not, rank 0 logs what that means."""
    history: History | None = state.get("history")
    if history is None:
        return None
    saved = state["pipeline"]["run"]
    if saved == run:
        return {part: pytree.tree_map_only(StoredTensor, read_value, history.get(part, {})) for part in PARTS}
    if rank == 0:
        logging.getLogger("penstock").info(
            "the checkpoint was saved without a drain by a run of %s, and this is one of %s: it goes on from the "
            "newest weights, as after a drain",
            saved,
            run,
        )
    return None


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
    for name, versions in history.get("weights", {}).items():
        if name in parameters and not all(
            isinstance(tensor, Tensor | StoredTensor) and tensor.shape == parameters[name].shape and _is_past(version)
            for version, tensor in versions.items()
        ):
            _refuse(f"history/weights/{name}", f"tensors of the shape {tuple(parameters[name].shape)}", versions)
    for stage, kept in history.get("stages", {}).items():
        counted = isinstance(kept, Mapping) and is_count(kept.get("updates"), 0)
        if not counted or not all(map(_is_past, kept.get("norms", {}))):
            _refuse(f"history/stages/{stage}", "the updates and norms of a stage", kept)


def _is_past(version: str) -> bool:
    return version == "0" or (version.startswith("-") and version[1:].isdecimal())
