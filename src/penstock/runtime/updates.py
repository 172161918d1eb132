"""The optimizers of a process, stepped one stage at a time.

A process has one set of optimizers for all its stages, and its stages come to their updates at different times. An
update steps what has gradients: those of one stage. What changes from update to update (learning rates, by a scheduler
of PyTorch's) is counted for every stage by itself.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from penstock.runtime.weights import VersionedWeights
from penstock.training.optimizers import MakeScheduler

__all__ = ["Updater"]

Options: TypeAlias = list[dict[str, Any]]
"""Of every group of an optimizer, all but its parameters."""


class Updater:
    """Steps `optimizers` for the stages of a process.

    `factors`: by stage, what learning rates are multiplied with. `make_scheduler`: called with each optimizer; what it
    returns steps once with every update.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        factors: Mapping[int, float],
        make_scheduler: MakeScheduler | None = None,
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._factors = factors
        self._courses = [_Course(make_scheduler(optimizer)) for optimizer in self._optimizers if make_scheduler]
        self._updates = dict.fromkeys(factors, 0)
        """How many updates each stage has had."""

    def step(self, stage: int, others: Iterable[VersionedWeights]) -> None:
        """One update of `stage`, whose parameters have their gradients. `others`: those of the process's stages that
        are not to be stepped.
        """
        with ExitStack() as stack:
            for weights in others:
                stack.enter_context(weights.hidden_gradients())
            for course in self._courses:
                course.take(self._updates[stage], min(self._updates.values()))
            for optimizer in self._optimizers:
                stack.enter_context(_scaled(optimizer, self._factors[stage]))
                optimizer.step()
        self._updates[stage] += 1
        # Around the whole training loop, a user's autocast would go on with casts of the weights before this update.
        torch.clear_autocast_cache()

    def state(self) -> dict[str, Any]:
        """How many updates there were, and of every scheduler what it saves; {} if there is none."""
        if not self._courses:
            return {}
        return {
            "updates": max(self._updates.values()),
            "schedulers": [(course.reached, course.scheduler.state_dict()) for course in self._courses],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`; the optimizers have been given their options before."""
        if not self._courses or not state:
            return
        self._updates = dict.fromkeys(self._updates, state["updates"])
        for course, (reached, saved) in zip(self._courses, state["schedulers"], strict=True):
            course.scheduler.load_state_dict(saved)
            course.restart(reached)


@dataclass(slots=True, eq=False)
class _Course:
    """The options of an optimizer at every update, as its scheduler sets them."""

    scheduler: LRScheduler
    reached: int = 0
    """The last update whose options have been worked out."""
    _options: dict[int, Options] = field(default_factory=dict)
    """By update; those that no stage needs any more are forgotten."""

    def __post_init__(self) -> None:
        self.restart(0)

    def restart(self, reached: int) -> None:
        """Takes the optimizer's present options for those of update `reached`."""
        self.reached, self._options = reached, {reached: _options_of(self.scheduler.optimizer)}

    def take(self, update: int, least: int) -> None:
        """Gives the optimizer the options of `update`. No stage needs those of updates before `least` any more."""
        while self.reached < update:
            # A scheduler may work out the next options from the present ones.
            _set_options(self.scheduler.optimizer, self._options[self.reached])
            self.scheduler.step()
            self.reached += 1
            self._options[self.reached] = _options_of(self.scheduler.optimizer)
        _set_options(self.scheduler.optimizer, self._options[update])
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
