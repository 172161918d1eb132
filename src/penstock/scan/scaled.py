"""Steps ``g -> J g + u`` of a chain, and their matrices and vectors: plain, or with powers of two kept aside, so that
long products neither overflow nor vanish.

A product of many Jacobians can leave the range of its type in directions that the gradient does not excite. Then an
infinity meets a zero, and the result is NaN where plain backpropagation is finite. Here every column of a matrix, and
every vector as a whole, has an exponent of its own. A multiplication with a power of two rounds nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.arguments import instance

_LAYOUT = {torch.float32: (torch.int32, 127, 23), torch.float64: (torch.int64, 1023, 52)}
"""By type: the integers of the same size, the bias of an exponent, and the bits of a fraction."""
_NOTHING = -(2**30)
"""The exponent of zero, which is below that of every number."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainMatrices:
    """Holds matrices (..., H, H) as they are."""

    values: Tensor

    def __matmul__(self, other: "PlainMatrices") -> "PlainMatrices":
        """The products with `other` on the right."""
        return PlainMatrices(self.values @ other.values)

    def apply(self, vectors: Tensor) -> Tensor:
        """The products with `vectors`, (..., H)."""
        return (self.values @ vectors.unsqueeze(-1)).squeeze(-1)

    def __getitem__(self, index: Any) -> "PlainMatrices":
        return PlainMatrices(self.values[index])


@dataclass(frozen=True, slots=True, eq=False)
class ScaledVectors:
    """Holds vectors ``values * 2 ** exponents``: `values` (..., H), `exponents` (..., 1)."""

    values: Tensor
    exponents: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "ScaledVectors":
        """Takes plain vectors (..., H)."""
        exponents = _exponents(values.abs().amax(-1, keepdim=True))
        return cls(_times(values, -exponents), exponents)

    def plain(self) -> Tensor:
        """The vectors as plain numbers, which are infinite where they leave the range."""
        return _times(self.values, self.exponents)

    def __add__(self, other: "ScaledVectors") -> "ScaledVectors":
        sizes = [torch.where(each.values.any(-1, keepdim=True), each.exponents, _NOTHING) for each in (self, other)]
        top = _above_nothing(torch.maximum(*sizes))
        return ScaledVectors.of(
            _times(self.values, self.exponents - top) + _times(other.values, other.exponents - top)
        )._raised(top)

    def __getitem__(self, index: Any) -> "ScaledVectors":
        return ScaledVectors(self.values[index], self.exponents[index])

    def __setitem__(self, index: Any, found: "ScaledVectors") -> None:
        self.values[index], self.exponents[index] = found.values, found.exponents

    def _raised(self, exponents: Tensor) -> "ScaledVectors":
        return ScaledVectors(self.values, self.exponents + exponents)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledMatrices:
    """Holds matrices ``values * 2 ** exponents``: `values` (..., H, H), `exponents` (..., 1, H), one for a column."""

    values: Tensor
    exponents: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "ScaledMatrices":
        """Takes plain matrices (..., H, H)."""
        exponents = _exponents(values.abs().amax(-2, keepdim=True))
        return cls(_times(values, -exponents), exponents)

    def __matmul__(self, other: "ScaledMatrices") -> "ScaledMatrices":
        """The products with `other` on the right."""
        # An exponent of a column on the left multiplies a row on the right.
        rows, top = _balanced(other.values, self.exponents.transpose(-1, -2), -2)
        product = ScaledMatrices.of(self.values @ rows)
        return ScaledMatrices(product.values, product.exponents + top + other.exponents)

    def apply(self, vectors: ScaledVectors) -> ScaledVectors:
        """The products with `vectors`."""
        balanced, top = _balanced(vectors.values, self.exponents.squeeze(-2), -1)
        found = ScaledVectors.of((self.values @ balanced.unsqueeze(-1)).squeeze(-1))
        return ScaledVectors(found.values, found.exponents + top + vectors.exponents)

    def __getitem__(self, index: Any) -> "ScaledMatrices":
        return ScaledMatrices(self.values[index], self.exponents[index])


def _balanced(values: Tensor, exponents: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    """``values * 2 ** (exponents - top)`` and `top`, with which the largest along `dimension` is near 1."""
    sizes = torch.where(values == 0, _NOTHING, torch.frexp(values).exponent + exponents)
    top = _above_nothing(sizes.amax(dimension, keepdim=True))
    return _times(values, exponents - top), top


def _above_nothing(exponents: Tensor) -> Tensor:
    return torch.where(exponents <= _NOTHING // 2, 0, exponents)


def _exponents(largest: Tensor) -> Tensor:
    """The exponents of `largest`, which are not negative; 0 for 0 and for what is not finite."""
    return torch.where(torch.isfinite(largest), torch.frexp(largest).exponent, 0)


def _times(values: Tensor, exponents: Tensor) -> Tensor:
    """``values * 2 ** exponents``."""
    # In two factors: 2 ** exponents may leave the range where the result does not.
    half = torch.bitwise_right_shift(exponents, 1)
    return values * _power_of_two(half, values.dtype) * _power_of_two(exponents - half, values.dtype)


def _power_of_two(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """``2 ** exponents``, made of its bits, since `torch.pow` may round. 0 below the normal numbers of `dtype`."""
    integers, bias, bits = _LAYOUT[dtype]
    biased = (exponents.to(integers) + bias).clamp(0, 2 * bias)
    return torch.bitwise_left_shift(biased, bits).view(dtype)


TENSOR = instance(Tensor, "a torch.Tensor", "give one")


class Steps:
    """Consecutive steps, each ``g -> J g + u``. Vectors and matrices are plain or scaled."""

    def __init__(self, matrices: Any, entering: Any) -> None:
        self.matrices, self.entering = matrices, entering

    def __len__(self) -> int:
        return len(self.matrices.values)

    def apply(self, index: int | slice, vectors: Any) -> Any:
        """What the steps at `index` make of `vectors`."""
        found = self.matrices[index].apply(vectors)
        return found if self.entering is None else found + self.entering[index]

    def then(self, later: "Steps") -> "Steps":
        """These steps, each followed by one of `later`."""
        entering = None if self.entering is None else later.matrices.apply(self.entering) + later.entering
        return Steps(later.matrices @ self.matrices, entering)

    def at(self, index: slice) -> "Steps":
        """The steps at `index`, in the same memory."""
        return Steps(self.matrices[index], None if self.entering is None else self.entering[index])

    def product(self) -> "Steps":
        """All of them as one, by products of neighbours."""
        found, rest = self, None
        while (count := len(found)) > 1:
            if count % 2:
                last = found.at(slice(count - 1, None))
                rest = last if rest is None else last.then(rest)
            pairs = count // 2
            found = found.at(slice(0, 2 * pairs, 2)).then(found.at(slice(1, 2 * pairs, 2)))
        return found if rest is None else found.then(rest)
