"""The optimizers of a process, stepped one stage at a time.

A process has one set of optimizers for all its stages, and its stages come to their updates at different times. An
update steps what has gradients: those of one stage. What changes from update to update (learning rates, by a scheduler
of PyTorch's) is counted for every stage by itself, and so is what the user's hooks keep.
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
from penstock.training.optimizers import MakeScheduler
from penstock.training.recipes import Recipe
from penstock.training.update_hooks import HookStates, UpdateHook, WeightAverage

__all__ = ["Updater", "exchanged", "readings_of"]

Options: TypeAlias = list[dict[str, Any]]
"""Of every group of an optimizer, all but its parameters."""


def readings_of(recipe: Recipe, delays: Iterable[int]) -> tuple[ComputeWeights, ...]:
    """By stage, what forwards read of its weights; `delays`: how old its gradients are."""
    return tuple(ComputeWeights(recipe.version_dtype, recipe.predicts(delay)) for delay in delays)


class Updater:
    """Steps `optimizers` for the stages of a process.

    `factors`: by stage, what learning rates are multiplied with. `make_scheduler`: called with each optimizer; what it
    returns steps once with every update. `hooks`: see every update; `delays`: by stage, how old its gradients are.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        factors: Mapping[int, float],
        make_scheduler: MakeScheduler | None = None,
        hooks: tuple[UpdateHook, ...] = (),
        delays: tuple[int, ...] = (),
    ) -> None:
        self.hooks = HookStates(hooks)
        self._delays = delays
        self._optimizers = tuple(optimizers)
        self._factors = factors
        self._courses = [_Course(make_scheduler(optimizer)) for optimizer in self._optimizers if make_scheduler]
        self._updates = dict.fromkeys(factors, 0)
        """How many updates each stage has had."""

    def step(self, stage: int, weights: VersionedWeights, others: Iterable[VersionedWeights]) -> dict[str, Tensor]:
        """One update of `stage`, whose `weights` have their gradients; what forwards read of it where that is not what
        the optimizers made. `others`: those of the process's stages that are not to be stepped.
        """
        before: dict[str, Tensor] = {}
        if self.hooks.hooks:
            stepped = weights.stepped.items()
            before = {name: parameter.detach().clone() for name, parameter in stepped if parameter.grad is not None}
        with ExitStack() as stack:
            for other in others:
                stack.enter_context(other.hidden_gradients())
            for course in self._courses:
                course.take(self._updates[stage], min(self._updates.values()))
            for optimizer in self._optimizers:
                stack.enter_context(_scaled(optimizer, self._factors[stage]))
                optimizer.step()
        self._updates[stage] += 1
        # Around the whole training loop, a user's autocast would go on with casts of the weights before this update.
        torch.clear_autocast_cache()
        return self.hooks.after_step(before, weights.stepped, self._delays[stage]) if before else {}

    def averages(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """What the first `WeightAverage` keeps of the trained `parameters`; of one without an update, its weights."""
        for hook, states in zip(self.hooks.hooks, self.hooks.states, strict=True):
            if isinstance(hook, WeightAverage):
                trained = {name: p.detach() for name, p in parameters.items() if p.requires_grad}
                return {name: states.get(name, {}).get("average", weights) for name, weights in trained.items()}
        raise PenstockError(
            "no averages are kept: expected a penstock.WeightAverage among update_hooks=, such as "
            "update_hooks=[penstock.WeightAverage(0.999)]"
        )

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps: how many updates there were, of a stage with the most; {} without schedulers."""
        return {"updates": max(self._updates.values())} if self._courses else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, or from the beginning if it knows of no updates. The optimizers' options are set."""
        if self._courses:
            reached = int(state.get("updates", 0))
            self._updates = dict.fromkeys(self._updates, reached)
            for course in self._courses:
                course.restart(max(reached - 1, 0))


@contextmanager
def exchanged(parameters: Mapping[str, nn.Parameter], others: Mapping[str, Tensor]) -> Iterator[None]:
    """In its body `parameters` have the numbers of `others`, by name."""
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


class _Course:
    """The options of an optimizer at every update, as its scheduler sets them."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler
        self._reached = 0
        """The last update whose options have been worked out."""
        self._options: dict[int, Options] = {0: _options_of(scheduler.optimizer)}
        """By update; those that no stage needs any more are forgotten."""
        self._beginning = copy.deepcopy(scheduler.state_dict()), _options_of(scheduler.optimizer)

    def restart(self, reached: int) -> None:
        """Goes to update `reached`, step by step: a process may have other optimizers than the one that saved."""
        state, options = self._beginning
        self._scheduler.load_state_dict(copy.deepcopy(state))
        self._reached, self._options = 0, {0: options}
        self.take(reached, reached)

    def take(self, update: int, least: int) -> None:
        """Gives the optimizer the options of `update`. No stage needs those of updates before `least` any more."""
        while self._reached < update:
            # A scheduler may work out the next options from the present ones.
            _set_options(self._scheduler.optimizer, self._options[self._reached])
            with warnings.catch_warnings():
                # After a checkpoint it has not seen the steps of the optimizer that were made before.
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                self._scheduler.step()
            self._reached += 1
            self._options[self._reached] = _options_of(self._scheduler.optimizer)
        _set_options(self._scheduler.optimizer, self._options[update])
        for old in [old for old in self._options if old < least]:
            del self._options[old]


def _options_of(optimizer: torch.optim.Optimizer) -> Options:
    return [{key: _own(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _set_options(optimizer: torch.optim.Optimizer, options: Options) -> None:
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update({key: _own(value) for key, value in own.items()})


def _own(value: Any) -> Any:
    """A learning rate may be a tensor, which schedulers change in place."""
    return value.clone() if isinstance(value, Tensor) else value


@contextmanager
def _scaled(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiplies the learning rates of `optimizer` in its body."""
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
