"""The optimizers of a process, stepped for its stages.

A process has one set of optimizers for all its stages. Under a schedule that flushes they step once per update, as in a
loop of PyTorch's: at the last update of a stage of the process. No action of a step reads the weights that it makes.
Under other schedules stages update at different times. An optimizer then steps the parameters that have gradients,
which are those of one stage, and its groups have the options of that stage. What a scheduler, or the optimizer itself,
changes from update to update follows the number of updates of the stage.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from penstock.errors import PenstockError
from penstock.runtime.parameters.weight_versions import ComputeWeights, VersionedWeights
from penstock.training.optimizers import MakeScheduler, make_scheduler
from penstock.training.recipes import Recipe
from penstock.training.update_corrections import HookStates, UpdateHook, WeightAverage

__all__ = ["StageUpdate", "Updater", "choose_compute_weights", "replaced_parameters"]

OptionsOfGroups: TypeAlias = list[dict[str, Any]]
"""The options of every group of an optimizer, without its parameters."""


def choose_compute_weights(recipe: Recipe, delays: Iterable[int]) -> tuple[ComputeWeights, ...]:
    """By stage, the weights that its forwards read; `delays`: how old its gradients are."""
    return tuple(ComputeWeights(recipe.version_dtype, recipe.predicts(delay)) for delay in delays)


@dataclass(frozen=True, slots=True)
class StageUpdate:
    """Holds what an update of one stage is made of."""

    stage: int
    version: int
    """The version of the weights that it makes."""
    weights: VersionedWeights
    gradients: Mapping[str, Tensor]
    """By parameter name."""
    skipped: bool
    """Whether the version equals the one before it, since gradients overflowed."""


class Updater:
    """Steps `optimizers` for the stages of a process.

    `factors`: by stage, the factor on learning rates. `lr_scheduler`: called with each optimizer; the scheduler that
    it returns steps once with every update. `hooks`: called at every update. `delays`: by stage, how old its gradients
    are. `together`: whether all stages step at once.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        factors: Mapping[int, float],
        lr_scheduler: MakeScheduler | None,
        hooks: tuple[UpdateHook, ...],
        delays: tuple[int, ...],
        *,
        together: bool,
    ) -> None:
        self.hooks = HookStates(hooks)
        self._delays = delays
        self.optimizers = tuple(optimizers)
        self._factors, self._together = factors, together
        self.schedulers: list[LRScheduler] = [
            make_scheduler(lr_scheduler, optimizer) for optimizer in self.optimizers if lr_scheduler
        ]
        """The schedulers of the optimizers, in their order; none if the user makes none."""
        apart = sorted(factors)[:1] if together else sorted(factors)
        self._options = [
            _GroupOptions(optimizer, self.schedulers[number] if self.schedulers else None, apart)
            for number, optimizer in enumerate(self.optimizers)
        ]
        self._updates = dict.fromkeys(factors, 0)
        """By stage, the number of its updates."""
        self._waiting: dict[int, StageUpdate] = {}
        """By stage, the updates that wait for those of other stages."""
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(_scaled(optimizer, next(iter(factors.values()), 1.0)))
            self.rates = self._present_rates()
        """The learning rates of the last update, by parameter group; before the first one, those that it will have."""

    def update(self, own: StageUpdate) -> Sequence[int]:
        """Makes an update, or keeps it until those of the other stages come that step with it. Returns the stages that
        have their new versions now.
        """
        if own.weights.newest >= own.version:
            # Another replica of the stage, in this process, has made it.
            return ()
        self._waiting.setdefault(own.stage, own)
        if self._together and len(self._waiting) < len(self._updates):
            return ()
        updates = [self._waiting.pop(stage) for stage in sorted(self._waiting)]
        for each in updates:
            each.weights.begin_update(each.version, {} if each.skipped else each.gradients)
        published = {} if own.skipped else self._step(updates)
        for each in updates:
            each.weights.end_update(published)
        return [each.stage for each in updates]

    def discard(self) -> None:
        """Drops the updates that wait for others."""
        self._waiting.clear()

    def _step(self, updates: Sequence[StageUpdate]) -> dict[str, Tensor]:
        """Steps the optimizers with the gradients of `updates`. Returns the weights that forwards are to read instead
        of those that the optimizers made.
        """
        stepped = {name: parameter for each in updates for name, parameter in each.weights.stepped.items()}
        before: dict[str, Tensor] = {}
        if self.hooks.hooks:
            before = {name: p.detach().clone() for name, p in stepped.items() if p.grad is not None}
        stage = updates[0].stage
        for options in self._options:
            options.choose(stage)
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(_scaled(optimizer, self._factors[stage]))
                optimizer.step()
            self.rates = self._present_rates()
        for options in self._options:
            options.advance()
        for each in updates:
            self._updates[each.stage] += 1
        # A user's autocast around the training loop would otherwise reuse casts of the weights before this update.
        torch.clear_autocast_cache()
        return self.hooks.after_step(before, stepped, self._delays[stage]) if before else {}

    def _present_rates(self) -> tuple[float | Tensor | None, ...]:
        return tuple(_own(group.get("lr")) for each in self.optimizers for group in each.param_groups)

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

    def options(self, number: int, stage: int) -> OptionsOfGroups:
        """The options that the optimizer `number` has at the next update of `stage`, by group."""
        self._options[number].choose(stage)
        return _options_of(self.optimizers[number])

    def state(self, stage: int | None = None) -> dict[str, int]:
        """The state for a checkpoint: the updates of `stage`, or of the one with the most; {} without schedulers."""
        if not self.schedulers:
            return {}
        # Before this mark, checkpoints had the options of the last update and not those of the next one.
        mark = {"next_options": 1}
        return {"updates": max(self._updates.values()) if stage is None else self._updates[stage], **mark}

    def updates_of(self, stage: int) -> int:
        """The number of updates of `stage`."""
        return self._updates[stage]

    def load_state(
        self,
        state: Mapping[str, Any],
        options: Mapping[int, Sequence[OptionsOfGroups]],
        updates: Mapping[int, int] | None = None,
    ) -> None:
        """Restores `state`, or starts anew if it has no updates.

        `options`: by stage and number of the optimizer, those of a checkpoint; a group without any keeps those that a
        new training would have by now. `updates`: by stage, where stages have made different numbers of them.
        """
        reached = int(state.get("updates", 0))
        self._updates = {stage: (updates or {}).get(stage, reached) for stage in self._updates}
        old = bool(self.schedulers) and "next_options" not in state
        for number, one in enumerate(self._options):
            one.restart(self._updates, {} if old else {stage: own[number] for stage, own in options.items()})


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
        self._initial = self._present()
        self._kept = {stage: self._present() for stage in apart}
        """By stage: the options, and the state of the scheduler. Those of the chosen stage are out of date."""
        self._chosen = next(iter(apart), None)
        self._left = _options_of(optimizer)
        """As the last update left them: what differs now is a change by the user."""

    def choose(self, stage: int) -> None:
        """Gives the groups the options of `stage`."""
        if stage == self._chosen or stage not in self._kept or self._chosen is None:
            return
        present = self._kept[self._chosen] = self._present()
        for number, (now, left) in enumerate(zip(present[0], self._left, strict=False)):
            changed = {key: value for key, value in now.items() if key not in left or not _equal(value, left[key])}
            for options, _ in self._kept.values():
                options[number].update(changed)
        self._set(*self._kept[stage])
        self._chosen, self._left = stage, _options_of(self._optimizer)

    def advance(self) -> None:
        """Ends an update of the chosen stage."""
        if self._scheduler is not None:
            self._scheduler.step()
        if len(self._kept) > 1:
            self._left = _options_of(self._optimizer)

    def restart(self, updates: Mapping[int, int], saved: Mapping[int, OptionsOfGroups]) -> None:
        """Begins after `updates` of each stage, with the options `saved` for it where there are any, by group.

        The scheduler goes there step by step: the process that saved may have had other optimizers.
        """
        if self._scheduler is not None:
            self._set(*self._initial)
            for options in saved.values():
                for group, own in zip(self._optimizer.param_groups, options, strict=True):
                    group["initial_lr"] = own.get("initial_lr", group["initial_lr"])
            _set_base_rates(self._scheduler)
        reached = 0
        for stage in sorted(self._kept, key=lambda stage: updates[stage]):
            with warnings.catch_warnings():
                # The scheduler has not seen the earlier steps of the optimizer.
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                for _ in range(updates[stage] - reached if self._scheduler is not None else 0):
                    self._scheduler.step()
            reached = updates[stage]
            self._kept[stage] = self._present()
            for other, groups in saved.items():
                if other == stage or len(self._kept) == 1:
                    for options, own in zip(self._kept[stage][0], groups, strict=True):
                        options.update(own)
        if self._chosen is not None:
            self._set(*self._kept[self._chosen])
            self._left = _options_of(self._optimizer)

    def _present(self) -> tuple[OptionsOfGroups, dict[str, Any]]:
        state = {} if self._scheduler is None else copy.deepcopy(self._scheduler.state_dict())
        return _options_of(self._optimizer), state

    def _set(self, options: OptionsOfGroups, state: Mapping[str, Any]) -> None:
        for group, own in zip(self._optimizer.param_groups, options, strict=False):
            group.update({key: _own(value) for key, value in own.items()})
        if self._scheduler is not None:
            self._scheduler.load_state_dict(copy.deepcopy(dict(state)))


def _set_base_rates(scheduler: Any) -> None:
    """Has `scheduler`, and those that it consists of, begin with the rates that the groups began with."""
    scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]
    for each in getattr(scheduler, "_schedulers", ()):
        _set_base_rates(each)


def _options_of(optimizer: torch.optim.Optimizer) -> OptionsOfGroups:
    return [{key: _own(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    return value is other or bool(value == other)


def _own(value: Any) -> Any:
    """A copy of `value` if it is a tensor: schedulers change such learning rates in place."""
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


@contextmanager
def _scaled(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Context manager in which the learning rates of `optimizer` are multiplied by `factor`."""
    if factor == 1:
        yield
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
