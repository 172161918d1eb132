"""What a training computes, value by value: seen from hooks of its optimizers, so in the same way in every training.

An update of a parameter has a number, which counts the updates of that parameter. So the same entries exist whether a
training makes its updates at once or stage by stage.
"""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.training.optimizers import MakeOptimizer, NamedParameters
from penstock.values.plans import Plan

KINDS = ("output", "loss", "metric", "gradient", "option", "state", "parameter", "buffer")
"""What a value is, in the order in which a step computes them. Options and state are those of the optimizers."""

Key: TypeAlias = tuple[int, str, str]
"""The step or update, from 0; the kind of the value; and its name."""


@dataclass(slots=True)
class TrainingRecord:
    """The values of one training."""

    values: dict[Key, Any] = field(default_factory=dict)
    updates: dict[str, int] = field(default_factory=dict)
    """By the name of a parameter that has an optimizer, the number of its updates so far."""
    plan: Plan | None = None
    """That of a pipeline."""

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
                options = {option: value for option, value in group.items() if option != "params"}
                for parameter in group["params"]:
                    name = names.get(id(parameter))
                    if name is not None and parameter.grad is not None:
                        stepped[name] = parameter
                        self.note(self.updates[name], "gradient", name, parameter.grad)
                        for option, value in options.items():
                            self.note(self.updates[name], "option", f"{option} of {name}", value)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for name, parameter in stepped.items():
                for entry, value in optimizer.state.get(parameter, {}).items():
                    self.note(self.updates[name], "state", f"{entry} of {name}", value)
                self.note(self.updates[name], "parameter", name, parameter)
                self.updates[name] += 1

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def note(self, number: int, kind: str, name: str, value: Any) -> None:
        """Adds a copy of `value`."""
        self.values[number, kind, name] = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)

    def finish(self, steps: int, parameters: Collection[str], state: Mapping[str, Tensor]) -> None:
        """Adds what the model holds after the last of `steps`: the `parameters` in `state`, and buffers."""
        for name, tensor in state.items():
            last = max(steps, self.updates.get(name, 0)) if name in parameters else steps
            self.note(last - 1, "parameter" if name in parameters else "buffer", name, tensor)
