"""Comparing the gradients of a model with those of its chain, in a part of the memory that either takes.

The gradients of the model are kept as far as a budget goes; of the others, sums over their bits. A chain mostly has the
same bits. Where it has not, the gradients are computed once more, to be kept.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from penstock.capturing.module_state import is_plain_memory

Gradients: TypeAlias = Mapping[str, Tensor | None]
"""By name of the parameter; None where there is none."""

_LEAST_BYTES = 8 * 2**20
"""Of a part, and of what is kept: to compute gradients in parts takes longer."""
_ROUNDINGS = 8
"""By how many times the rounding that two backwards of a model have shown its chain may differ."""
_WIDTHS = (1021, 1024)


def parts_of(parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    """`parameters` in parts of a quarter of their bytes, or of one parameter that has more."""
    limit = max(_bytes_of(parameters.values()) // 4, _LEAST_BYTES)
    part: dict[str, nn.Parameter] = {}
    for name, parameter in parameters.items():
        if part and _bytes_of((*part.values(), parameter)) > limit:
            yield part
            part = {}
        part[name] = parameter
    if part:
        yield part


class GradientComparison:
    """Compares the gradients of some parameters, which come part by part: first those of a model, then of its chain.

    parameters: by name.
    compare: the text of a difference between two tensors; empty if there is none that counts.
    again: whether sums did not tell. Then at least one gradient is kept.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], compare: Callable[[Tensor, Tensor], str], *, again: bool
    ) -> None:
        self.one_sided: list[str] = []
        """Names of those that have a gradient in the model or in the chain only."""
        self.different: dict[str, str] = {}
        """By name, the text of each difference."""
        self.unclear: list[str] = []
        """Names of those whose bits differ, and which were not kept."""
        self._compare = compare
        sizes = [_bytes_of((parameter,)) for parameter in parameters.values()]
        self._budget = max(sum(sizes) // 8, _LEAST_BYTES, *(sizes if again else ()))
        self._kept: dict[str, Tensor | None] = {}
        self._sums: dict[str, Tensor] = {}
        self._distances: dict[str, Tensor] = {}
        self._roundings: dict[str, Tensor] = {}

    def keep(self, gradients: Gradients) -> None:
        """Takes some gradients of the model."""
        for name, gradient in gradients.items():
            size = 0 if gradient is None else _bytes_of((gradient,))
            if gradient is None or size <= self._budget or not is_plain_memory(gradient):
                self._kept[name] = gradient
                self._budget -= size
            else:
                self._sums[name] = _sums(gradient)

    def compare(self, gradients: Gradients) -> None:
        """Takes the gradients of the chain for the same parameters."""
        for name, gradient in gradients.items():
            own = self._kept.get(name)
            if (gradient is None) != (own is None and name not in self._sums):
                self.one_sided.append(name)
            elif gradient is None:
                continue
            elif own is None:
                self.unclear += [] if torch.equal(self._sums[name], _sums(gradient)) else [name]
            elif text := self._compare(own, gradient):
                self.different[name] = text
                self._distances[name] = _distance(own, gradient)

    def note_rounding(self, gradients: Gradients) -> None:
        """Takes the gradients of the model for some of `different`, as another backward has computed them."""
        for name, gradient in gradients.items():
            own = self._kept[name]
            if own is not None and gradient is not None:
                distance = _distance(own, gradient)
                self._roundings[name] = torch.maximum(distance, self._roundings.get(name, distance))

    def allow_rounding(self) -> None:
        """Leaves in `different` what is more than rounding.

        That is relative to the numbers that were summed, which may be much larger than their sum.
        """
        for name in list(self.different):
            if bool(self._distances[name] <= _ROUNDINGS * self._roundings[name]):
                del self.different[name]


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _distance(one: Tensor, other: Tensor) -> Tensor:
    """The greatest difference of two elements."""
    return (one - other).abs_().max() if not one.is_complex() else (one - other).abs().max()


def _sums(gradient: Tensor) -> Tensor:
    """Sums over the bits, of which one differs wherever a few numbers or their places do."""
    numbers = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    # In the order of memory, where there is no need of a copy.
    order = sorted(range(numbers.dim()), key=numbers.stride, reverse=True)
    found = numbers.permute(order).contiguous().flatten().view(torch.uint8)
    words = found[: len(found) // 8 * 8].view(torch.int64)
    sums = [found[len(words) * 8 :].to(torch.int64)]
    for width in _WIDTHS:
        rows = len(words) // width
        sums += [words[: rows * width].view(rows, width).sum(0), words[rows * width :]]
    # Each a copy: nothing keeps the gradient.
    return torch.cat(sums)
