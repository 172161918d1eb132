"""The optimizers of a process, stepped one stage at a time.

A process has one set of optimizers for all its stages, and its stages update at different times. An optimizer steps the
parameters that have gradients, which are those of one stage. Options that change from update to update (learning rates,
by a scheduler of PyTorch's) follow the number of updates of each stage, and so does the state of the user's hooks.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from penstock.errors import PenstockError
from penstock.runtime.parameters.weight_versions import ComputeWeights, VersionedWeights
from penstock.training.optimizers import MakeScheduler, make_scheduler
from penstock.training.recipes import Recipe
from penstock.training.update_corrections import HookStates, UpdateHook, WeightAverage

__all__ = ["Updater", "choose_compute_weights", "replaced_parameters"]

_Options: TypeAlias = list[dict[str, Any]]
"""The options of every group of an optimizer, without its parameters."""


def choose_compute_weights(recipe: Recipe, delays: Iterable[int]) -> tuple[ComputeWeights, ...]:
    """By stage, the weights that its forwards read; `delays`: how old its gradients are."""
    return tuple(ComputeWeights(recipe.version_dtype, recipe.predicts(delay)) for delay in delays)


class Updater:
    """Steps `optimizers` for the stages of a process.

    `factors`: by stage, the factor on learning rates. `lr_scheduler`: called with each optimizer; the scheduler that
    it returns steps once with every update. `hooks`: called at every update. `delays`: by stage, how old its gradients
    are.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        factors: Mapping[int, float],
        lr_scheduler: MakeScheduler | None,
        hooks: tuple[UpdateHook, ...],
        delays: tuple[int, ...],
    ) -> None:
        self.hooks = HookStates(hooks)
        self._delays = delays
        self.optimizers = tuple(optimizers)
        self._factors = factors
        self._lr_schedules = [
            _LrSchedule(make_scheduler(lr_scheduler, optimizer)) for optimizer in self.optimizers if lr_scheduler
        ]
        self._updates = dict.fromkeys(factors, 0)
        """By stage, the number of its updates."""
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(_scaled(optimizer, next(iter(factors.values()), 1.0)))
            self.rates = self._present_rates()
        """The learning rates of the last update, by parameter group; before the first one, those that it will have."""

    def step(self, stage: int, weights: VersionedWeights) -> dict[str, Tensor]:
        """Makes one update of `stage`, whose `weights` alone have gradients. Returns the weights that forwards are to
        read instead of those that the optimizers made.
        """
        before: dict[str, Tensor] = {}
        if self.hooks.hooks:
            stepped = weights.stepped.items()
            before = {name: parameter.detach().clone() for name, parameter in stepped if parameter.grad is not None}
        with ExitStack() as stack:
            for lr_schedule in self._lr_schedules:
                lr_schedule.apply(self._updates[stage], min(self._updates.values()))
            for optimizer in self.optimizers:
                stack.enter_context(_scaled(optimizer, self._factors[stage]))
                optimizer.step()
            self.rates = self._present_rates()
        self._updates[stage] += 1
        # A user's autocast around the training loop would otherwise reuse casts of the weights before this update.
        torch.clear_autocast_cache()
        return self.hooks.after_step(before, weights.stepped, self._delays[stage]) if before else {}

    @property
    def schedulers(self) -> list[LRScheduler]:
        """The schedulers of the optimizers, in their order; none if the user makes none."""
        return [lr_schedule.scheduler for lr_schedule in self._lr_schedules]

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
        return tuple(one.name for one in self._lr_schedules) or (None,) * len(self.optimizers)

    def state(self, stage: int | None = None) -> dict[str, int]:
        """The state for a checkpoint: the updates of `stage`, or of the one with the most; {} without schedulers."""
        if not self._lr_schedules:
            return {}
        return {"updates": max(self._updates.values()) if stage is None else self._updates[stage]}

    def updates_of(self, stage: int) -> int:
        """The number of updates of `stage`."""
        return self._updates[stage]

    def load_state(self, state: Mapping[str, Any], updates: Mapping[int, int] | None = None) -> None:
        """Restores `state`, or starts anew if it has no updates. Sets the options of the optimizers.

        `updates`: by stage, where stages have made different numbers of them.
        """
        if self._lr_schedules:
            reached = int(state.get("updates", 0))
            self._updates = {stage: (updates or {}).get(stage, reached) for stage in self._updates}
            for lr_schedule in self._lr_schedules:
                lr_schedule.restart(max(min(self._updates.values()) - 1, 0))


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


class _LrSchedule:
    """Sets the options of an optimizer for any update, as its scheduler would."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler
        self._reached = 0
        """The last update whose options have been computed."""
        self._options: dict[int, _Options] = {0: _options_of(scheduler.optimizer)}
        """By update; those that no stage needs any more are dropped."""
        self._initial = copy.deepcopy(scheduler.state_dict()), _options_of(scheduler.optimizer)

    @property
    def name(self) -> str:
        """The class of the scheduler."""
        return type(self.scheduler).__qualname__

    def restart(self, reached: int) -> None:
        """Goes to update `reached`, step by step: the process that saved may have had other optimizers."""
        state, options = self._initial
        self.scheduler.load_state_dict(copy.deepcopy(state))
        self._reached, self._options = 0, {0: options}
        self.apply(reached, reached)

    def apply(self, update: int, oldest: int) -> None:
        """Sets the options of `update`. No stage needs those of updates before `oldest` any more."""
        while self._reached < update:
            # A scheduler may compute the next options from the present ones.
            _set_options(self.scheduler.optimizer, self._options[self._reached])
            with warnings.catch_warnings():
                # After a checkpoint the scheduler has not seen the earlier steps of the optimizer.
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                self.scheduler.step()
            self._reached += 1
            self._options[self._reached] = _options_of(self.scheduler.optimizer)
        _set_options(self.scheduler.optimizer, self._options[update])
        for old in [old for old in self._options if old < oldest]:
            del self._options[old]


def _options_of(optimizer: torch.optim.Optimizer) -> _Options:
    return [{key: _own(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _set_options(optimizer: torch.optim.Optimizer, options: _Options) -> None:
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update({key: _own(value) for key, value in own.items()})


def _own(value: Any) -> Any:
    """A copy of `value` if it is a tensor: schedulers change such learning rates in place."""
    return value.clone() if isinstance(value, Tensor) else value


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
