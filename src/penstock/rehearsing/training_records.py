"""What a training computes, value by value: seen from hooks of its optimizers, so in the same way in every training.

An update of a parameter has a number, which counts the updates of that parameter. So the same entries exist whether a
training makes its updates at once or stage by stage.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.training.optimizers import MakeOptimizer, NamedParameters


class ValueKind(IntEnum):
    """What a value is, in the order in which a step computes them."""

    OUTPUT = 0
    LOSS = 1
    METRIC = 2
    GRADIENT = 3
    OPTION = 4
    STATE = 5
    PARAMETER = 6
    BUFFER = 7


Key: TypeAlias = tuple[int, ValueKind, str]
"""The step or update, from 0; the kind of the value; and its name."""


@dataclass(slots=True)
class TrainingRecord:
    """The values of one training."""

    values: dict[Key, Any] = field(default_factory=dict)
    updates: dict[str, int] = field(default_factory=dict)
    """By the name of a parameter that has an optimizer, the number of its updates so far."""

    def watching(self, make: MakeOptimizer) -> MakeOptimizer:
        """`make`, whose optimizers are recorded: gradients and options before every update, weights and state after."""

        def make_watched(parameters: NamedParameters) -> Any:
            made = make(parameters)
            names = {id(parameter): name for name, parameter in parameters.items()}
            self.updates.update(dict.fromkeys(names.values(), 0))
            for optimizer in made if isinstance(made, tuple | list) else (made,):
                if isinstance(optimizer, torch.optim.Optimizer):
                    self._watch(optimizer, names)
            return made

        return make_watched

    def _watch(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        stepped: dict[str, Tensor] = {}

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            stepped.clear()
            for group in optimizer.param_groups:
                options = {name: value for name, value in group.items() if name != "params"}
                for parameter in group["params"]:
                    name = names.get(id(parameter))
                    if name is not None and parameter.grad is not None:
                        stepped[name] = parameter
                        self._note(name, ValueKind.GRADIENT, {"": parameter.grad})
                        self._note(name, ValueKind.OPTION, options)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for name, parameter in stepped.items():
                self._note(name, ValueKind.STATE, optimizer.state.get(parameter, {}))
                self._note(name, ValueKind.PARAMETER, {"": parameter})
                self.updates[name] += 1

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _note(self, name: str, kind: ValueKind, entries: Mapping[str, Any]) -> None:
        for entry, value in entries.items():
            self.note(self.updates[name], kind, f"{entry} of {name}" if entry else name, value)

    def note(self, number: int, kind: ValueKind, name: str, value: Any) -> None:
        """Adds a copy of `value`."""
        self.values[number, kind, name] = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)

    def finish(self, steps: int, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Adds what the model holds after the last of `steps`."""
        for name, tensor in parameters.items():
            self.note(max(steps, self.updates.get(name, 0)) - 1, ValueKind.PARAMETER, name, tensor)
        for name, tensor in buffers.items():
            self.note(steps - 1, ValueKind.BUFFER, name, tensor)
