"""Whether two trainings compute the same numbers, apart from rounding.

Rounding is measured, not assumed: the loop trains once more from weights that differ in their last bit. What becomes of
that difference is what rounding can do in this training: to a gradient that is zero but for rounding, or to an update
of Adam, which divides by such gradients.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.rehearsing.training_records import Key, TrainingRecord, ValueKind

_MARGIN = 32.0
"""Rounding in another order may do this many times as much as a change of the last bit of the weights."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first value that two trainings do not share."""

    step: int
    """From 0. For values of parameters: the number of the update."""
    kind: str
    """output, loss, metric, gradient, option, state, parameter or buffer."""
    name: str
    expected: float
    """Where the difference is greatest."""
    found: float
    size: float
    """The greatest difference; infinite if one has no such number, or a tensor has another shape."""
    allowed: float
    """What rounding may make of it."""

    def __str__(self) -> str:
        what = f"the {self.kind} {self.name}".rstrip()
        where = f"{what} in step {self.step}" if self.kind != "buffer" else f"{what} after step {self.step}"
        return f"{where} is {self.found:.6g} instead of {self.expected:.6g} (rounding: up to {self.allowed:.1g})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two trainings, one beside the other."""

    before: str
    after: str
    largest: float
    """The greatest difference in parts of what rounding may make of it: up to 1 the two are equal."""
    difference: Difference | None
    """The first one that is no rounding."""


class Rounding:
    """How far values of two trainings may be apart: measured by `loop` and `shaken`, whose weights begin with
    differences of about `eps`.
    """

    def __init__(self, loop: TrainingRecord, shaken: TrainingRecord, eps: float) -> None:
        self._loop, self._shaken, self._eps = loop, shaken, eps
        self._scales: dict[tuple[int, ValueKind, str], float] = {}
        for key, value in loop.values.items():
            self._scales[_family(key)] = max(self._scales.get(_family(key), 0.0), _magnitude(value))

    def allowed(self, key: Key, value: Any) -> float:
        """How far another value may be from `value`, the one of `key`."""
        scale = max(self._scales.get(_family(key), 0.0), _magnitude(value))
        if key[1] is ValueKind.OPTION:
            return 1e-9 * scale
        mine, other = self._loop.values.get(key), self._shaken.values.get(key)
        shaken = 0.0 if mine is None or other is None else _apart(mine, other)[0]
        return _MARGIN * (self._eps * scale + (shaken if math.isfinite(shaken) else 0.0))


def compare(names: tuple[str, str], expected: TrainingRecord, found: TrainingRecord, rounding: Rounding) -> Comparison:
    """The trainings `expected` and `found`, which are called `names`."""
    largest, first = 0.0, None
    for key, mine, other in _pairs(expected, found):
        size, own, its = _apart(mine, other)
        if size == 0.0:
            continue
        allowed = rounding.allowed(key, mine)
        largest = max(largest, size / allowed if allowed else math.inf)
        if size > allowed and first is None:
            kind = key[1].name.lower()
            first = Difference(step=key[0], kind=kind, name=key[2], expected=own, found=its, size=size, allowed=allowed)
    return Comparison(*names, largest, first)


def _pairs(expected: TrainingRecord, found: TrainingRecord) -> Iterator[tuple[Key, Any, Any]]:
    """The values that both have, in the order in which a step computes them."""
    for key in sorted(expected.values, key=lambda key: key[:2]):
        mine = expected.values[key]
        if key in found.values:
            yield key, mine, found.values[key]
        elif key[1] is ValueKind.GRADIENT and key[2] in found.updates:
            # There was none, or the update was left out.
            yield key, mine, torch.zeros_like(mine)


def _family(key: Key) -> tuple[int, ValueKind, str]:
    """The values whose rounding has one scale: a gradient of zero is the sum of numbers as large as others."""
    number, kind, name = key
    if kind in (ValueKind.GRADIENT, ValueKind.PARAMETER):
        return number, kind, ""
    return number, kind, name.partition(" of ")[0] if kind is ValueKind.STATE else name


def _magnitude(value: Any) -> float:
    numbers = _numbers(value)
    if numbers is None or not numbers.numel():
        return 0.0
    return float(numbers.abs().nan_to_num(0.0, posinf=0.0).max())


def _apart(mine: Any, other: Any) -> tuple[float, float, float]:
    """The greatest difference, and the two numbers that have it."""
    a, b = _numbers(mine), _numbers(other)
    if a is None and b is None:
        # Whether other objects are the same is not for `==` to say.
        plain = isinstance(mine, str | tuple | list)
        return (0.0 if not plain or mine == other else math.inf), math.nan, math.nan
    if a is None or b is None or a.shape != b.shape:
        return math.inf, math.nan, math.nan
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs().nan_to_num(math.inf))
    if not apart.numel():
        return 0.0, math.nan, math.nan
    where = int(apart.argmax())
    return float(apart[where]), float(a[where]), float(b[where])


def _numbers(value: Any) -> Tensor | None:
    """The numbers of a tensor, or the number; None for anything else."""
    if isinstance(value, Tensor):
        dense = value.to_dense() if value.layout is not torch.strided else value
        real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        return real.detach().to("cpu", torch.float64).flatten()
    if isinstance(value, int | float):
        return torch.tensor([float(value)], dtype=torch.float64)
    return None


def earliest(differences: Iterable[Difference]) -> Difference | None:
    """The first one, of those of several ranks."""
    order = {kind.name.lower(): kind for kind in ValueKind}
    return min(differences, key=lambda found: (found.step, order[found.kind]), default=None)
