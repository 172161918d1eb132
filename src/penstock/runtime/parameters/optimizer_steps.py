"""The optimizers of a process, stepped for its stages.

A process has one set of optimizers for all its stages. Under a schedule that flushes they step once per update, as in a
loop of PyTorch's: at the last update of a stage of the process. No action of a step reads the weights that it makes.
Under other schedules stages update at different times. An optimizer then steps the parameters that have gradients,
which are those of one stage, and its groups have the options of that stage. What a scheduler, or the optimizer itself,
changes from update to update follows the number of updates of the stage.

Where the state is on the host, an update steps the parameters part by part, in the order of the optimizer, and each
part with the options that all begin with. That is exact for optimizers that step each parameter by itself: it is tried.
"""

import copy
import inspect
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from penstock.errors import PenstockError
from penstock.runtime.devices.process_hooks import HeldInterrupts
from penstock.runtime.parameters.host_states import HostStates, in_parts
from penstock.runtime.parameters.shards import local_shard
from penstock.runtime.parameters.weight_versions import VersionedWeights
from penstock.torch_internals.modules import flat_schedulers, step_hooks
from penstock.torch_internals.unimported import is_dtensor
from penstock.training.optimizers import MakeScheduler, make_scheduler, needs_closure
from penstock.training.update_corrections import HookStates, UpdateHook, WeightAverage

OptionsOfGroups: TypeAlias = list[dict[str, Any]]
"""The options of every group of an optimizer, without its parameters."""


class Updater:
    """Steps `optimizers` for the stages of a process.

    `stages`: those of the process. `lr_scheduler`: called with each optimizer; the scheduler that it returns steps once
    with every update. `hooks`: called at every update. `delays`: by stage, how old its gradients are. `host`: keeps the
    state on the host; `PenstockError` if a step in parts has other numbers.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        stages: Collection[int],
        lr_scheduler: MakeScheduler | None,
        hooks: tuple[UpdateHook, ...],
        delays: tuple[int, ...],
        *,
        together: bool,
        host: HostStates | None = None,
    ) -> None:
        self.hooks, self.host = HookStates(hooks), host
        self._delays = delays
        self.optimizers = tuple(optimizers)
        self.together = together
        """Whether all stages step at once."""
        self.schedulers: list[LRScheduler] = []
        """The schedulers of the optimizers, in their order; none if the user makes none."""
        self._options: list[_GroupOptions] = []
        for optimizer in self.optimizers:
            if lr_scheduler is not None:
                self.schedulers.append(make_scheduler(lr_scheduler, optimizer))
            apart = sorted(stages)[:1] if together else sorted(stages)
            self._options.append(_GroupOptions(optimizer, self.schedulers[-1] if self.schedulers else None, apart))
        self._updates = dict.fromkeys(stages, 0)
        """By stage, the number of its updates."""
        self._examined = set[int]()
        """The stages at whose first update the optimizers have been looked at."""
        self._waiting: dict[int, tuple[VersionedWeights, int, Mapping[str, Tensor] | None]] = {}
        """By stage, the updates that wait for those of other stages."""
        self.interrupts = HeldInterrupts()
        """To be entered for a step. Where all stages step at once, Ctrl-C waits from that moment for the end."""
        self.read_rates()
        if host is not None:
            for optimizer in self.optimizers:
                _check_steps_apart(optimizer)
                host.put_away(optimizer.state)

    def update(
        self, stage: int, version: int, weights: VersionedWeights, gradients: Mapping[str, Tensor] | None
    ) -> Sequence[int]:
        """Updates `stage`, or keeps that until all stages come that step together. Returns the stages that have their
        new versions now. `gradients`: None for a version that equals the one before it.
        """
        if weights.newest >= version:
            # Another replica of the stage, in this process, has made it.
            return ()
        self._waiting[stage] = weights, version, gradients
        if self.together and len(self._waiting) < len(self._updates):
            return ()
        if self.together:
            self.interrupts.hold()
        waiting, self._waiting = dict(sorted(self._waiting.items())), {}
        for held, number, own in waiting.values():
            held.begin_update(number, own or {})
        stepped = {name: parameter for held, *_ in waiting.values() for name, parameter in held.stepped.items()}
        published = {} if gradients is None else self._step(list(waiting), stepped)
        for held, *_ in waiting.values():
            held.end_update(published)
        if self.host is not None:
            self.host.settle()
        return list(waiting)

    def discard(self) -> None:
        """Drops the updates that wait for others."""
        self._waiting.clear()

    def _step(self, stages: Sequence[int], stepped: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Steps the parameters of `stages`. Returns the weights that forwards are to read instead of these."""
        before: dict[str, Tensor] = {}
        if self.hooks.hooks:
            before = {name: p.detach().clone() for name, p in stepped.items() if p.grad is not None}
        with ExitStack() as stack:
            for options, optimizer in zip(self._options, self.optimizers, strict=True):
                options.choose(stages[0])
                if len(self._updates) > len(stages) and (stages[0] not in self._examined or step_hooks(optimizer)):
                    stack.enter_context(_nothing_shared(optimizer))
            for optimizer in self.optimizers if self.host is None else self._in_parts(self.host, stepped):
                try:
                    optimizer.step()
                except Exception as error:
                    if "closure" in f"{error} {traceback.extract_tb(error.__traceback__)[-1].line}":
                        raise needs_closure(optimizer) from error
                    raise
            self.rates = self._present_rates()
        self._examined.update(stages)
        for options in self._options:
            options.advance()
        for stage in stages:
            self._updates[stage] += 1
        # A user's autocast around the training loop would otherwise reuse casts of the weights before this update.
        torch.clear_autocast_cache()
        return self.hooks.after_step(before, stepped, self._delays[stages[0]]) if self.hooks.hooks else {}

    def _in_parts(self, host: HostStates, stepped: Mapping[str, nn.Parameter]) -> Iterator[torch.optim.Optimizer]:
        """Each optimizer for every part of what it steps: while nothing else has gradients, and the state is there."""
        gradients = {id(parameter): parameter.grad for parameter in stepped.values() if parameter.grad is not None}
        for parameter in stepped.values():
            parameter.grad = None
        for optimizer in self.optimizers:
            own = {id(p): p for group in optimizer.param_groups for p in group["params"] if id(p) in gradients}
            # The values themselves: a tensor among them may be the user's.
            begun = [dict(group) for group in optimizer.param_groups]
            for part in host.visit(in_parts(own), optimizer.state):
                _set_options(optimizer, begun)
                for key, parameter in part.items():
                    parameter.grad = gradients[key]
                yield optimizer
                for parameter in part.values():
                    parameter.grad = None

    def _present_rates(self) -> tuple[float | Tensor | None, ...]:
        return tuple(_own(group.get("lr")) for each in self.optimizers for group in each.param_groups)

    def read_rates(self) -> None:
        """Takes the rates that the groups have now for those of the last update: before the first one of a run."""
        self.rates = self._present_rates()
        """The learning rates of the last update, by parameter group; before the first one, those it will have."""

    def averages(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """The averages of the first `WeightAverage` for the trained `parameters`; before an update, the weights."""
        for hook, states in zip(self.hooks.hooks, self.hooks.states, strict=True):
            if isinstance(hook, WeightAverage):
                trained = {name: p.detach() for name, p in parameters.items() if p.requires_grad}
                return {name: states.get(name, {}).get("average", weights) for name, weights in trained.items()}
        raise PenstockError(
            "no averages are kept: expected a penstock.WeightAverage among update_hooks=, such as "
            "update_hooks=[penstock.WeightAverage(0.999)]"
        )

    @property
    def scheduler_names(self) -> tuple[str | None, ...]:
        """By optimizer, the class of its scheduler; None without one."""
        return tuple(type(one).__qualname__ for one in self.schedulers) or (None,) * len(self.optimizers)

    def choose(self, stage: int) -> None:
        """Gives the groups of the optimizers the options that they have at the next update of `stage`."""
        for options in self._options:
            options.choose(stage)

    def state(self, stage: int | None = None) -> dict[str, int]:
        """The state for a checkpoint: the updates of `stage`, or of the one with the most; {} without schedulers."""
        if not self.schedulers:
            return {}
        return {"updates": max(self._updates.values()) if stage is None else self._updates[stage], "next_options": 1}

    def updates_of(self, stage: int) -> int:
        """The number of updates of `stage`."""
        return self._updates[stage]

    def load_state(self, state: Mapping[str, Any], updates: Mapping[int, int], exact: bool) -> None:
        """Restores `state`, or starts anew if it has no updates. The optimizers have the options of a checkpoint.

        `updates`: by stage, where stages have made different numbers of them. `exact`: whether the options are those
        of the next update of every stage; if not, they are computed. Older checkpoints had those of the last update.
        """
        reached = int(state.get("updates", 0))
        self._updates = {stage: updates.get(stage, reached) for stage in self._updates}
        exact = exact and len({*self._updates.values()}) == 1 and ("next_options" in state or not self.schedulers)
        for options in self._options:
            options.restart(self._updates, exact)


@contextmanager
def replaced_parameters(parameters: Mapping[str, nn.Parameter], others: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager in which `parameters` have the values `others`, by name."""
    own = {name: parameters[name].detach().clone() for name in others}
    with torch.no_grad():
        for name, tensor in others.items():
            parameters[name].copy_(tensor)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in own.items():
                parameters[name].copy_(tensor)


class _GroupOptions:
    """Gives the groups of an optimizer the options that a stage has at its next update.

    Each of the stages `apart` has options and a state of `scheduler` of its own. What the user changes in the groups
    between updates counts for all of them. A single stage, or stages that step together, have those of the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, apart: Sequence[int]) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._chosen, self._initial = apart[0], self._present()
        self._kept = {stage: self._present() for stage in apart}
        """By stage: the options, and the state of the scheduler. Those of the chosen stage are out of date."""
        self._left = _options_of(optimizer)
        """As the last update left them: what differs now is a change by the user."""

    def choose(self, stage: int) -> None:
        """Gives the groups the options of `stage`."""
        if stage == self._chosen or stage not in self._kept:
            return
        self._kept[self._chosen] = present, _ = self._present()
        for now, left, *kept in zip(present, self._left, *(own for own, _ in self._kept.values()), strict=False):
            changed = {key: value for key, value in now.items() if key not in left or not _equal(value, left[key])}
            for options in kept:
                options.update({key: _own(value) for key, value in changed.items()})
        self._set(stage)

    def advance(self) -> None:
        """Ends an update of the chosen stage."""
        if self._scheduler is not None:
            self._scheduler.step()
        if len(self._kept) > 1:
            self._left = _options_of(self._optimizer)

    def restart(self, updates: Mapping[int, int], exact: bool) -> None:
        """Begins after `updates` of each stage, with the present options if they are `exact`, else with those that the
        scheduler makes of the present ones.

        It goes there step by step: the process that saved may have had other optimizers.
        """
        loaded = _options_of(self._optimizer)
        if self._scheduler is not None:
            self._kept[self._chosen] = copy.deepcopy(self._initial)
            self._set(self._chosen)
            for each in flat_schedulers(self._scheduler):
                # They begin with the rates that the loaded groups began with.
                rates = zip(loaded, each.base_lrs, strict=False)
                each.base_lrs = [own.get("initial_lr", rate) for own, rate in rates]
        reached = 0
        for stage in sorted(self._kept, key=lambda stage: updates[stage]):
            with warnings.catch_warnings():
                # The scheduler has not seen the earlier steps of the optimizer.
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                while self._scheduler is not None and reached < updates[stage]:
                    self._scheduler.step()
                    reached += 1
            options, state = self._present()
            groups = zip(self._optimizer.param_groups, options, loaded, self._initial[0], strict=False)
            for group, now, own, begun in groups:
                scheduled = {key for key in now if key == "lr" or not _equal(now[key], begun.get(key))}
                if group["params"]:
                    now.update({key: _own(value) for key, value in own.items() if exact or key not in scheduled})
            self._kept[stage] = options, state
        self._set(self._chosen)

    def _present(self) -> tuple[OptionsOfGroups, dict[str, Any]]:
        state = {} if self._scheduler is None else copy.deepcopy(self._scheduler.state_dict())
        return _options_of(self._optimizer), state

    def _set(self, stage: int) -> None:
        # The groups may have these options themselves: what is kept for the chosen stage is out of date.
        self._chosen, (options, state) = stage, self._kept[stage]
        _set_options(self._optimizer, options)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state)
        self._left = _options_of(self._optimizer)


@contextmanager
def _nothing_shared(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager in which `optimizer` steps one of several stages, each at its own time.

    Raises `PenstockError` if it has hooks of the user's on its steps, or counts steps outside of the state of
    parameters and the options of groups: it would count those of all stages together.
    """
    before = _numbers(optimizer)
    hooked = bool(step_hooks(optimizer))
    yield
    changed = [name for name, value in _numbers(optimizer).items() if value != before.get(name)]
    if hooked or changed:
        found = f"its attribute {changed[0]!r} changes" if changed else "hooks run"
        raise PenstockError(
            f"{type(optimizer).__qualname__}: {found} with every step, and under this schedule every stage of the "
            "process has steps of its own: expected nothing that stages share. Choose a schedule that flushes, run one "
            "process per stage, or keep such values in the state of every parameter"
        )


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """What `optimizer` counts outside of the state of parameters and the options of groups."""
    state: Any = optimizer.state
    values = {**vars(optimizer), **{key: value for key, value in state.items() if isinstance(key, str)}}
    return {
        name: float(value)
        for name, value in values.items()
        if type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def _options_of(optimizer: torch.optim.Optimizer) -> OptionsOfGroups:
    return [{key: _own(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _set_options(optimizer: torch.optim.Optimizer, options: OptionsOfGroups) -> None:
    for group, own in zip(optimizer.param_groups, options, strict=False):
        for key in group.keys() - own.keys() - {"params"}:
            del group[key]
        group.update(own)


def _check_steps_apart(optimizer: torch.optim.Optimizer) -> None:
    """Raises `PenstockError` if small parameters have other numbers where `optimizer` steps them in halves."""
    found = "hooks on its steps" if step_hooks(optimizer) else ""
    if any(is_dtensor(p) and p.is_cuda for group in optimizer.param_groups for p in group["params"]):
        found = "DTensors of a GPU, which cannot be put together on the host"
    try:
        if not found and not all(map(torch.equal, _small_steps(optimizer, 1), _small_steps(optimizer, 2))):
            found = "other numbers where small ones are stepped in halves: it counts its steps, or sums over all"
    except Exception as error:
        found = f"a failure where small ones are stepped: {type(error).__name__}: {error}"
    if found:
        raise PenstockError(
            "state_on_host=: expected an optimizer that steps each parameter by itself, since an update has a step for "
            f"each part of them, found {type(optimizer).__qualname__} with {found}. Use another one, or leave "
            "state_on_host= out"
        )


def _small_steps(optimizer: torch.optim.Optimizer, parts: int) -> list[Tensor]:
    """Small parameters in the place of those of `optimizer`, after some steps in `parts`."""
    groups: list[dict[str, Any]] = [{**options, "params": []} for options in _options_of(optimizer)]
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        shards = map(local_shard, group["params"])
        own["params"] = [nn.Parameter(shard.new_ones([min(size, 2) for size in shard.shape])) for shard in shards]
    small: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
    takes, defaults = inspect.signature(type(optimizer)).parameters, optimizer.defaults
    made = type(optimizer)(groups, **{key: value for key, value in defaults.items() if key in takes})
    with torch.random.fork_rng({parameter.device for parameter in small if parameter.is_cuda}):
        for step in range(1, 4):
            begun = [dict(group) for group in made.param_groups]
            for part in range(parts):
                _set_options(made, begun)
                for place, parameter in enumerate(small):
                    present = place * parts // len(small) == part
                    parameter.grad = torch.full_like(parameter, step + place) if present else None
                made.step()
    return [parameter.detach() for parameter in small]


def _equal(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) and bool(value == other))


def _own(value: Any) -> Any:
    """A copy of `value`: schedulers change learning rates that are tensors in place."""
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)
