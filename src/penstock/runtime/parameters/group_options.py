"""The options of an optimizer's groups, where stages of a process update at different times.

A stage has the options of its own updates: what a scheduler, or the optimizer itself, changes from update to update
follows the number of updates of the stage. What the user changes between updates counts for all stages.
"""

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from penstock.torch_internals.modules import flat_schedulers

OptionsOfGroups: TypeAlias = list[dict[str, Any]]
"""The options of every group of an optimizer, without its parameters."""
_FIXED = (float, int, bool, str, tuple, type(None))
"""Types whose values are their own copies."""


class GroupOptions:
    """Gives the groups of an optimizer the options that a stage has at its next update.

    Each of the stages `apart` has options and a state of `scheduler` of its own. What the user changes in the groups
    between updates counts for all of them. A single stage, or stages that step together, have those of the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, apart: Sequence[int]) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._chosen, self._initial = apart[0], self._present()
        self._kept = {stage: self._present() for stage in apart}
        """By stage: the options, and the state of the scheduler. Those of the chosen stage are out of date."""
        self._left = options_of(optimizer)
        """As the last update left them: what differs now is a change by the user."""

    def choose(self, stage: int) -> None:
        """Gives the groups the options of `stage`."""
        if stage == self._chosen or stage not in self._kept:
            return
        self._kept[self._chosen] = present, _ = self._present()
        for place, (now, left) in enumerate(zip(present, self._left, strict=False)):
            for key, value in now.items():
                if key not in left or (value is not left[key] and not _equal(value, left[key])):
                    for options, _ in self._kept.values():
                        if place < len(options):
                            options[place][key] = own_copy(value)
        self._set(stage)

    def advance(self) -> None:
        """Ends an update of the chosen stage."""
        if self._scheduler is not None:
            self._scheduler.step()
        if len(self._kept) > 1:
            self._left = options_of(self._optimizer)

    def restart(self, updates: Mapping[int, int], exact: bool) -> None:
        """Begins after `updates` of each stage, with the present options if they are `exact`, else with those that the
        scheduler makes of the present ones.

        It goes there step by step: the process that saved may have had other optimizers.
        """
        loaded = options_of(self._optimizer)
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
                    now.update({key: own_copy(value) for key, value in own.items() if exact or key not in scheduled})
            self._kept[stage] = options, state
        self._set(self._chosen)

    def _present(self) -> tuple[OptionsOfGroups, dict[str, Any]]:
        state = {} if self._scheduler is None else copy.deepcopy(self._scheduler.state_dict())
        return options_of(self._optimizer), state

    def _set(self, stage: int) -> None:
        # The groups may have these options themselves: what is kept for the chosen stage is out of date.
        self._chosen, (options, state) = stage, self._kept[stage]
        set_options(self._optimizer, options)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state)
        self._left = options_of(self._optimizer)


def options_of(optimizer: torch.optim.Optimizer) -> OptionsOfGroups:
    found: OptionsOfGroups = []
    for group in optimizer.param_groups:
        own = dict(group)
        del own["params"]
        for key, value in own.items():
            if type(value) not in _FIXED:
                own[key] = own_copy(value)
        found.append(own)
    return found


def set_options(optimizer: torch.optim.Optimizer, options: OptionsOfGroups) -> None:
    for group, own in zip(optimizer.param_groups, options, strict=False):
        for key in group.keys() - own.keys() - {"params"}:
            del group[key]
        group.update(own)


def own_copy(value: Any) -> Any:
    """A copy of `value`: schedulers change learning rates that are tensors in place."""
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


def _equal(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) and bool(value == other))
