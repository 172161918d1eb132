"""Comparing two trainings: to the bit, or by how much they differ and where."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_cases.training import Outcome
from penstock.capturing.samples import flatten

__all__ = ["Difference", "compare", "compare_outputs"]

FLOOR = 1e-3
"""Smaller tensors are compared on this scale: the gradient of a key's bias is 0 but for rounding."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The greatest difference between two trainings."""

    relative: float
    """To the largest number of the loss or the tensor; infinite where something is missing or not finite in one."""
    where: str


def compare(expected: Outcome, found: Outcome) -> Difference:
    """The greatest difference in losses, parameters, buffers and attributes; 0 if they are equal to the bit."""
    if len(expected.losses) != len(found.losses):
        return Difference(math.inf, "the number of losses")
    pairs: list[tuple[str, Any, Any]] = [
        (f"the loss of step {number}", torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
        for number, (a, b) in enumerate(zip(expected.losses, found.losses, strict=True))
    ]
    pairs += _states(expected.state, found.state)
    return _worst(pairs)


def compare_outputs(expected: Any, found: Any) -> Difference:
    """The greatest difference between the tensors of two outputs."""
    mine, theirs = ([leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)] for tree in (expected, found))
    if len(mine) != len(theirs):
        return Difference(math.inf, "the number of outputs")
    return _worst([(f"output {index}", a, b) for index, (a, b) in enumerate(zip(mine, theirs, strict=True))])


def _worst(pairs: Iterable[tuple[str, Any, Any]]) -> Difference:
    worst = Difference(0.0, "")
    for where, a, b in pairs:
        relative = _relative(a, b)
        if relative > worst.relative:
            worst = Difference(relative, where)
    return worst


def _states(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    pairs: list[tuple[str, Any, Any]] = [
        (name, value, None)
        for name, value in expected.items()
        if not name.startswith("attribute ") and name not in found
    ]
    for name, value in found.items():
        plain = expected.get(name.removeprefix("saved "))
        if plain is not None or not name.startswith("attribute "):
            pairs.append((name, plain, value))
    return pairs


def _relative(a: Any, b: Any) -> float:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return math.inf
        if a.is_sparse and b.is_sparse:
            a, b = a.to_dense(), b.to_dense()
        if torch.equal(a, b) or a.numel() == 0:
            return 0.0
        if a.is_quantized:
            return math.inf
        wide = torch.complex128 if a.is_complex() else torch.float64
        a, b = a.detach().to(wide), b.detach().to(wide)
        if not torch.equal(a.isfinite(), b.isfinite()):
            return math.inf
        mask = a.isfinite()
        if not bool(mask.all()) and not torch.equal(a[~mask].nan_to_num(7.0), b[~mask].nan_to_num(7.0)):
            return math.inf
        a, b = a[mask], b[mask]
        if a.numel() == 0:
            return 0.0
        return float((a - b).abs().max() / max(float(a.abs().max()), FLOOR))
    if isinstance(a, bool | int | float) and isinstance(b, bool | int | float):
        return 0.0 if a == b or (a != a and b != b) else abs(a - b) / max(abs(a), abs(b))
    return math.inf
