"""The state of a training under the model's own names, so that it fits any number of stages.

The optimizer's state and options are kept by parameter name, not by position: positions depend on the plan. A state
also says what it is the state of (classes of optimizers, schedulers and hooks), so that another training can refuse it.

Under a schedule without a flush a checkpoint may be saved without a drain. The microbatches in flight are not saved:
the run that goes on computes them again, with the older versions of the weights that they read. These are in its
*history*, with what else crosses the cut: the scales of losses, and the buffers of replicas, each of which has seen
other microbatches. A history fits the plan and the schedule that it was made under. Under others the
training goes on from the newest weights, as after a drain.

A state is compared with the training as a whole (`state_checks`) before `restore` changes anything. Tensors of a
checkpoint are read one after the other, each to its place.
"""

import copy
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.capturing.chain import LayerChain
from penstock.errors import CheckpointError
from penstock.runtime.assembly.weight_exports import held_tensors
from penstock.runtime.checkpoints.manifests import StoredTensor, bytes_of, copied_value, digest_of, read_value
from penstock.runtime.checkpoints.module_entries import ModuleEntries
from penstock.runtime.checkpoints.own_states import give_state
from penstock.runtime.engine.engine import Engine
from penstock.runtime.files.plain_values import decode, decode_plain, encode, encode_plain, name_of, type_named
from penstock.runtime.parameters.host_states import in_parts
from penstock.runtime.parameters.optimizer_steps import Updater
from penstock.runtime.parameters.shards import distributed_like, whole
from penstock.runtime.transport.worlds import World
from penstock.scheduling.schedules import Schedule
from penstock.torch_internals import pytrees as pytree
from penstock.torch_internals.subclasses import put_together, taken_apart, wraps_tensors
from penstock.torch_internals.unimported import is_dtensor
from penstock.training.recipes import Recipe
from penstock.values.plan_stages import Stage
from penstock.values.plans import Plan

State: TypeAlias = Mapping[str, Any]
History: TypeAlias = Mapping[str, Any]

PARTS = ("weights", "stages", "buffers")
"""Weights by name and version; counts and scales by stage; buffers by stage, replica and number."""


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
    entries: ModuleEntries
    loss: nn.Module | None
    """The module that the loss function is, or is a method of."""
    saves_frozen: bool
    """Whether checkpoints have the numbers of the frozen weights, or digests of them."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers of this process."""
        return self.updater.optimizers

    @property
    def held(self) -> dict[str, Tensor]:
        """The entries of the model's state dict that belong to this process's stages."""
        return held_tensors(self.chain, self.stages)

    @property
    def frozen(self) -> dict[str, nn.Parameter]:
        """The parameters of this process's stages that are not trained."""
        return {n: t for n, t in self.held.items() if isinstance(t, nn.Parameter) and not t.requires_grad}

    @property
    def scales(self) -> dict[str, Tensor]:
        """What frozen modules of this process's stages have in the state dict beside parameters and buffers."""
        return {n: v for n, v in self.entries.collect().items() if self.entries.is_frozen(n, v)}

    def base(self) -> dict[str, Any]:
        """By name, what checkpoints have digests of, frozen weights and their scales; none by default. Of a `DTensor`,
        which all of its processes make whole together, the digest itself.
        """
        named = {} if self.saves_frozen else {**self.frozen, **self.scales}
        return {name: digest_of(whole(value)) if is_dtensor(value) else value for name, value in named.items()}

    def collect(self, take: Callable[[Any], Any] = whole) -> dict[str, Any]:
        """``{"model": ..., "optimizer": ..., "pipeline": ...}`` of parts, and what ``take(value)`` keeps of a value."""
        engine, updater = self.engine, self.updater
        return {
            "model": {name: kept(tensor, take) for name, tensor in self.held.items()},
            "optimizer": self.named(take),
            "pipeline": {**self.progress, **updater.state(), **engine.scales.state()},
        }

    def copied(self) -> dict[str, Any]:
        """Copies of it and of what is `beside`, on their devices. Tied weights share memory in it, too."""
        # A schedule with several versions writes later ones into the same memory, out of turn.
        state: dict[str, Any] = put_together(copy.deepcopy(self.collect()))
        return add_beside(state, {name: copied_value(value) for name, value in self.beside().items()})

    def beside(self, *, scales: bool = True) -> dict[str, Any]:
        """What belongs to no tensor of the model and to no parameter's state, by name; not copies. After a slash: what
        the loss and the optimizers keep; else: entries of the model's state dict, with the `scales` of frozen weights.
        """
        found = self.entries.collect()
        if not scales:
            found = {name: value for name, value in found.items() if not self.entries.is_frozen(name, value)}
        if self.computes_loss and self.loss is not None and (own := self.loss.state_dict()):
            found["/loss_fn"] = own
        for number, optimizer in enumerate(self.optimizers):
            own = {key: value for key, value in _state_dict(optimizer).items() if key not in ("state", "param_groups")}
            shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
            if own or shared:
                found[f"/optimizer/{number}"] = {"own": own, "state": shared}
        return found

    @property
    def computes_loss(self) -> bool:
        """Whether this process has the last layer, and so the loss."""
        return any(stage.stop == len(self.chain.layers) for stage in self.stages)

    def gather_entries(self, world: World, rank: int | None) -> dict[str, Any]:
        """The entries of the whole model's state dict that no plain tensor is, on `rank`, or on all. Collective."""

        def kept(tensor: Tensor, where: str) -> str:
            own = whole(tensor).cpu().contiguous()
            return encode_plain((name_of(own.dtype), own.shape, bytes(bytes_of(own)))).decode()

        def read(text: str) -> Tensor:
            name, shape, data = decode_plain(text.encode())
            tensor = torch.empty(shape, dtype=type_named(name), device="cpu")
            bytes_of(tensor)[:] = data
            return tensor

        found = {name: tensor for name, tensor in self.held.items() if wraps_tensors(tensor)} | self.entries.collect()
        every = world.gather({name: encode(value, name, kept) for name, value in found.items()})
        chosen = every if rank in (None, world.rank) else []
        return {name: put_together(decode(value, read)) for own in chosen for name, value in own.items()}

    @property
    def progress(self) -> dict[str, Any]:
        """The part ``pipeline`` of the state, as far as it belongs to no stage."""
        own = self.engine
        return {"steps": own.steps, "microbatches": own.trained, "seed": own.seed, "hooks": self.hook_names}

    @property
    def hook_names(self) -> list[str]:
        """The classes of the update hooks, in their order."""
        return [type(hook).__qualname__ for hook in self.updater.hooks.hooks]

    def restore(self, state: State) -> None:
        """Takes over `state`, which `check_state` has accepted."""
        beside = state.get("beside", {})
        if self.loss is not None and "/loss_fn" in beside:
            # First, since it may refuse its state.
            give_state("loss_fn", self.loss, copied_value(beside["/loss_fn"]))
        for number, optimizer in enumerate(self.optimizers):
            # The old state goes first, so that there is one in memory.
            optimizer.state = defaultdict(dict)
            self._restore_optimizer(optimizer, state["optimizer"], beside.get(f"/optimizer/{number}", {}))
        self._restore_hooks(state["optimizer"]["hooks"])
        base = state.get("base", {})
        self.entries.restore(state["model"], {n: tensor for n, tensor in self.held.items() if n not in base})
        progress, engine = state["pipeline"], self.engine
        history = _open_history(state, self.run, self.rank)
        updates = {} if history is None else {int(stage): kept["updates"] for stage, kept in history["stages"].items()}
        self.updater.load_state(progress, updates, exact=history is not None or "history" not in state)
        engine.scales.load(progress)
        engine.seed, engine.steps = progress["seed"], progress["steps"]
        engine.resume(progress["microbatches"], history)

    def named(self, take: Callable[[Any], Any], of: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
        """By parameter: the state and options of its optimizer, the classes of optimizer and scheduler, and what the
        hooks keep, by their number. `of`: the names of some parameters, by default all.
        """
        result: dict[str, dict[str, Any]] = {"state": {}, "options": {}, "classes": {}, "hooks": {}}

        def keep(value: Any, where: str) -> Any:
            return pytree.tree_map_only(Tensor, lambda tensor: taken_apart(take(tensor), where), value)

        for optimizer, classes in zip(self.optimizers, self.classes, strict=True):
            states = _state_dict(optimizer)["state"]
            for place, (group, name, _) in enumerate(self.grouped(optimizer)):
                if of is not None and name not in of:
                    continue
                result["options"][name] = {key: value for key, value in group.items() if key != "params"}
                result["classes"][name] = classes
                if place in states:
                    own = {key: keep(value, f"the state {key!r} of {name}") for key, value in states[place].items()}
                    result["state"][name] = own
        for number, states in enumerate(self.updater.hooks.states):
            for name, kept in states.items():
                if kept and (of is None or name in of):
                    named = {f"{number}.{key}": keep(value, f"a hook's {key} of {name}") for key, value in kept.items()}
                    result["hooks"].setdefault(name, {}).update(named)
        return result

    @property
    def classes(self) -> list[list[str | None]]:
        """By optimizer, its class and that of its scheduler."""
        schedulers = self.updater.scheduler_names
        return [[type(one).__qualname__, name] for one, name in zip(self.optimizers, schedulers, strict=True)]

    def grouped(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
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

    def _restore_optimizer(self, optimizer: torch.optim.Optimizer, saved: State, beside: State) -> None:
        kept = copied_value(beside) or {"own": {}, "state": {}}
        current, host = {**optimizer.state_dict(), **kept["own"]}, self.updater.host
        described = dict(zip(map(id, optimizer.param_groups), current["param_groups"], strict=True))
        parameters: dict[tuple[int, str], nn.Parameter] = {}
        for place, (group, name, parameter) in enumerate(self.grouped(optimizer)):
            options = described[id(group)]
            for key, value in _copied(saved["options"][name], parameter, "lr").items():
                tensors = isinstance(value, Tensor) and isinstance(options.get(key), Tensor)
                options[key] = value.to(options[key].device) if tensors else value
            parameters[place, name] = parameter
        loaded: dict[Any, Any] = {}
        for part in [parameters] if host is None else in_parts(parameters):
            laid = {
                place: {key: _copied(value, parameter, key) for key, value in saved["state"][name].items()}
                for (place, name), parameter in part.items()
                if name in saved["state"]
            }
            current["state"] = {**laid, **kept["state"]}
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
        for name in filter(self.updater.owns, self.trained().keys() & saved.keys()):
            for place, value in saved[name].items():
                number, _, key = place.partition(".")
                kept = _copied(value, self.trained()[name], key)
                hooks.states[int(number)].setdefault(name, {})[key] = kept


def _copied(value: Any, parameter: nn.Parameter, key: str) -> Any:
    """`value`, read or copied, as the parameter is laid out; what is not element by element stays whole.

    A copy: the optimizer would go on in the caller's tensors. PyTorch keeps ``step`` where it was made.
    """

    def take(own: Tensor) -> Tensor:
        if own.shape == parameter.shape:
            own = distributed_like(own, parameter)
        return own if key in ("step", "lr") else own.to(parameter.device)

    return copied_value(value, take)


def kept(tensor: Tensor, take: Callable[[Any], Any] = whole) -> Any:
    """What ``take(tensor)`` keeps of a tensor of the model, taken apart if it wraps others."""
    found = take(tensor.detach())
    return taken_apart(found) if wraps_tensors(found) else found


def add_beside(state: dict[str, Any], beside: State) -> dict[str, Any]:
    """`state` with what is `beside`."""
    model, others = dict(state["model"]), dict[str, Any]()
    for name, value in beside.items():
        (others if name.startswith("/") else model)[name] = value
    return {**state, "model": model, "beside": others}


def loss_module(function: Any) -> nn.Module | None:
    """The module that a loss function is, or is a method of."""
    while isinstance(function, functools.partial):
        function = function.func
    found = getattr(function, "__self__", function)
    return found if isinstance(found, nn.Module) else None


def _state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's own; the states alone if its class does not call ``super().__init__()``, which it needs."""
    try:
        return optimizer.state_dict()
    except AttributeError:
        if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            raise
        every = enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])
        return {"state": {place: optimizer.state[each] for place, each in every if each in optimizer.state}}


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
