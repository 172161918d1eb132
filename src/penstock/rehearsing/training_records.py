"""What trainings compute, value by value, and whether two of them compute the same numbers, apart from rounding.

The values are seen from hooks of optimizers, so in the same way in every training. An update of a parameter has a
number, which counts the updates of that parameter. So the same entries exist whether a training makes its updates at
once or stage by stage.

Rounding is measured, not assumed: the loop trains once more from weights that differ in their last bit. What becomes of
that difference is what rounding can do in this training: to a gradient that is zero but for rounding, or to an update
of Adam, which divides by such gradients.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.training.optimizers import MakeOptimizer, NamedParameters
from penstock.values.plans import Plan

KINDS = ("output", "loss", "metric", "gradient", "option", "state", "parameter", "buffer", "evaluation")
"""What a value is, in the order in which a step computes them. Options and state are those of the optimizers."""

Key: TypeAlias = tuple[int, str, str]
"""The step or update, from 0; the kind of the value; and its name."""

Rounding: TypeAlias = Callable[[Key, Any], float]
"""How far another value may be from that of a key."""

_MARGIN = 32.0
"""Rounding in another order may do this many times as much as a change of the last bit of the weights."""


@dataclass(slots=True)
class TrainingRecord:
    """The values of one training."""

    values: dict[Key, Any] = field(default_factory=dict)
    updates: dict[str, int] = field(default_factory=dict)
    """By the name of a parameter that has an optimizer, the number of its updates so far."""
    read_by_loss: set[int] = field(default_factory=set)
    """The trained tensors that the loss of a loop reads beside the output, by id."""
    dtype: str = ""
    """The type of that loss."""
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

        # One that wraps another optimizer may have left out what makes its hooks.
        with suppress(AttributeError):
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


@dataclass(frozen=True, slots=True)
class Difference:
    """The first value that two trainings do not share."""

    step: int
    """From 0. For values of parameters: the number of the update."""
    kind: str
    """One of `KINDS`."""
    name: str
    expected: float
    """Where the difference is greatest."""
    found: float
    size: float
    """The greatest difference; infinite if one has no such number, or a tensor has another shape."""
    allowed: float
    """What rounding may make of it."""

    def __str__(self) -> str:
        when = "after" if self.kind in ("buffer", "evaluation") else "in"
        where = f"{self.kind} {self.name}".rstrip()
        found = f"{self.found:.6g} instead of {self.expected:.6g} (rounding: up to {self.allowed:.1g})"
        return f"the {where} {when} step {self.step} is {found}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two trainings, one beside the other."""

    before: str
    after: str
    largest: float
    """The greatest difference in parts of what rounding may make of it: up to 1 the two are equal."""
    difference: Difference | None
    """The first one that is no rounding."""


def measure_rounding(loop: TrainingRecord, shaken: TrainingRecord, eps: float) -> Rounding:
    """How far values may be apart, by two trainings whose weights begin with differences of about `eps`."""
    # A gradient of zero may be a sum of numbers as large as other gradients.
    scales = dict.fromkeys(("gradient", "state", "parameter"), 0.0)
    for (_, kind, _), value in loop.values.items():
        if kind in scales:
            scales[kind] = max(scales[kind], _magnitude(value))

    def allowed(key: Key, value: Any) -> float:
        scale = max(scales.get(key[1], 0.0), _magnitude(value))
        if key[1] == "option":
            return 1e-9 * scale
        moved = _apart(loop.values[key], shaken.values[key])[0] if key in loop.values and key in shaken.values else 0.0
        return _MARGIN * (eps * scale + (moved if math.isfinite(moved) else 0.0))

    return allowed


def compare(before: str, after: str, records: tuple[TrainingRecord, TrainingRecord], rounding: Rounding) -> Comparison:
    """The `records` of the trainings that are called `before` and `after`."""
    largest, first = 0.0, None
    for key, mine, other in _pairs(*records):
        size, expected, found = _apart(mine, other)
        if size == 0.0:
            continue
        allowed = rounding(key, mine)
        largest = max(largest, size / allowed if allowed else math.inf)
        if size > allowed and first is None:
            first = Difference(*key, expected=expected, found=found, size=size, allowed=allowed)
    return Comparison(before, after, largest, first)


def earliest(differences: Iterable[Difference]) -> Difference | None:
    """The first one, of those of several ranks."""
    return min(differences, key=lambda found: (found.step, KINDS.index(found.kind)), default=None)


def _pairs(expected: TrainingRecord, found: TrainingRecord) -> Iterator[tuple[Key, Any, Any]]:
    """The values that both have, in the order in which a step computes them."""
    for key in sorted(expected.values, key=lambda key: (key[0], KINDS.index(key[1]))):
        mine = expected.values[key]
        if key in found.values:
            yield key, mine, found.values[key]
        elif key[1] == "gradient" and key[2] in found.updates:
            # There was none, or the update was left out.
            yield key, mine, torch.zeros_like(mine)


def _magnitude(value: Any) -> float:
    numbers = _numbers(value).abs().nan_to_num(0.0, posinf=0.0)
    return float(numbers.max()) if numbers.numel() else 0.0


def _apart(mine: Any, other: Any) -> tuple[float, float, float]:
    """The greatest difference, and the two numbers that have it."""
    a, b = _numbers(mine), _numbers(other)
    if a.shape != b.shape or not a.numel():
        return (0.0 if a.shape == b.shape else math.inf), math.nan, math.nan
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs().nan_to_num(math.inf))
    where = int(apart.argmax())
    return float(apart[where]), float(a[where]), float(b[where])


def _numbers(value: Any) -> Tensor:
    """The numbers of a tensor, of a tuple or a list, or the number; none of anything else."""
    if not isinstance(value, Tensor):
        entries = value if isinstance(value, tuple | list) else (value,)
        return torch.tensor([float(each) for each in entries if isinstance(each, int | float)], dtype=torch.float64)
    dense = value.to_dense() if value.layout is not torch.strided else value
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return real.detach().to("cpu", torch.float64).flatten()
