"""A chain of small layers, ``torch.nn.Sequential``, whose backward is a scan over the Jacobians of its layers.

Layers may have different numbers of values, so each product is one of its own: algorithm 1 of Wang, Bai and Pekhimenko,
MLSys 2020, on a list. It pays only where layers are many and narrow: a Jacobian of a sample has as many numbers as the
inputs of its layer times the outputs.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penstock.errors import PenstockError
from penstock.scan.sparse import LayerJacobian, layer_jacobian

E = TypeVar("E")
_MOST_BYTES = 2**30


def scan_list(elements: Sequence[E], then: Callable[[E, E], E], levels: int | None = None) -> list[E]:
    """What the elements before each place, in their order, are together: of all places but the first.

    ``then(earlier, later)`` puts two neighbours together. It must be associative, and need not be commutative. The
    identity, which stands before the first place, is never put together with anything. `levels`: of the up-sweep that
    are done; the rest goes step by step.
    """
    own, last = list(elements), len(elements) - 1
    most = max(last.bit_length() - 1, 0)
    levels = most if levels is None else min(levels, most)
    for level in range(levels):
        for earlier, later in _pairs(last, level):
            own[later] = then(own[earlier], own[later])
    before: list[Any] = [None] * len(own)
    ends = [min((block + 1) << levels, last + 1) - 1 for block in range(-(-(last + 1) >> levels))]
    for end, following in pairwise(ends):
        before[following] = own[end] if before[end] is None else then(before[end], own[end])
    for level in reversed(range(levels)):
        for earlier, later in _pairs(last, level):
            found = before[later]
            before[later] = own[earlier] if found is None else then(found, own[earlier])
            before[earlier] = found
    return before[1:]


def _pairs(last: int, level: int) -> list[tuple[int, int]]:
    """The places that a level puts together; the bounds include their ends."""
    firsts = range(0, last - (1 << level) + 1, 2 << level)
    return [(first + (1 << level) - 1, min(first + (2 << level) - 1, last)) for first in firsts]


class ScanSequential(nn.Sequential):
    """`torch.nn.Sequential` with a backward by parallel scan. Its parameters have the same names.

    Layers take and return one tensor whose dimension 0 counts samples, and treat each sample by itself. Jacobians of
    convolutions, poolings, Linear, ReLU, Tanh and Sigmoid follow from rules, and others come from `torch.func`.

    Args:
        layers: as of `torch.nn.Sequential`.
        most_bytes: that the Jacobians of a batch and their products may take.

    Raises:
        PenstockError: in the forward, where they would take more than `most_bytes`. In the first backward of each
            shape, for a layer whose Jacobians are not what autograd computes: one that mixes samples (BatchNorm in
            training mode), draws random numbers (Dropout) or changes what it reads.
    """

    def __init__(self, *layers: Any, most_bytes: int = _MOST_BYTES) -> None:
        super().__init__(*layers)
        self.most_bytes = most_bytes
        self._jacobians: dict[tuple[nn.Module, tuple[int, ...]], LayerJacobian | None] = {}
        self.checked: set[tuple[nn.Module, torch.Size]] = set()
        """The layers, with the shapes of their batches, whose Jacobians were compared with autograd."""

    def jacobian_of(self, layer: nn.Module, shape: tuple[int, ...]) -> LayerJacobian | None:
        """The sparse Jacobian of a layer for samples of `shape`, whose pattern is found once; None if none is known."""
        key = layer, shape
        if key not in self._jacobians:
            try:
                self._jacobians[key] = layer_jacobian(layer, shape)
            except PenstockError:
                self._jacobians[key] = None
        return self._jacobians[key]

    def forward(self, input: Tensor) -> Tensor:
        """The output of the last layer."""
        if not torch.is_grad_enabled():
            plain: Tensor = super().forward(input)  # type: ignore[no-untyped-call]
            return plain
        found: Tensor = _ChainBackward.apply(self, input, *self.parameters())  # type: ignore[no-untyped-call]
        return found


class _ChainBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: ScanSequential, input: Tensor, *parameters: Tensor) -> Tensor:
        values = [input.detach()]
        for layer in chain:
            # A copy, since a layer may write in place.
            values.append(layer(values[-1].clone()))
        _check_size(values, chain.most_bytes)
        ctx.chain = chain
        ctx.save_for_backward(*values)
        return values[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        values = ctx.saved_tensors
        layers: list[nn.Module] = list(ctx.chain)
        # Of the outputs of the last layer first, and those of the first layer last.
        jacobians = [_transposed(ctx.chain, layer, *each) for layer, each in zip(layers, pairwise(values), strict=True)]
        for layer, given, jacobian in zip(layers, values, jacobians, strict=False):
            _check_jacobian(ctx.chain, layer, given, jacobian)
        elements = [gradient.flatten(1).unsqueeze(-1), *reversed(jacobians)]
        after = [elements[0]]
        if layers:
            after = scan_list(elements, lambda earlier, later: later @ earlier)
            after.append(elements[-1] @ after[-1])
        of_values = [found.reshape(value.shape) for found, value in zip(after, reversed(values), strict=True)]
        of_parameters: dict[Tensor, Tensor] = {}
        for layer, given, found in zip(layers, values[:-1], of_values[-2::-1], strict=True):
            # All layers know their gradients now, so they are independent of each other.
            own = [parameter for parameter in layer.parameters() if parameter.requires_grad]
            if own:
                with torch.enable_grad():
                    output = layer(given.clone())
                for parameter, part in zip(
                    own, torch.autograd.grad(output, own, found, allow_unused=True), strict=True
                ):
                    if part is not None:
                        known = of_parameters.get(parameter)
                        of_parameters[parameter] = part if known is None else known + part
        return None, of_values[-1], *(of_parameters.get(parameter) for parameter in ctx.chain.parameters())


def _transposed(chain: ScanSequential, layer: nn.Module, given: Tensor, output: Tensor) -> Tensor:
    """The transposed Jacobians of a layer, (B or 1, inputs, outputs)."""
    if type(layer) in (nn.Flatten, nn.Identity):
        return torch.eye(given[0].numel(), dtype=given.dtype, device=given.device).unsqueeze(0)
    known = chain.jacobian_of(layer, tuple(given.shape[1:]))
    if known is None:
        return _by_rows(chain, layer, given)
    found = known.pattern.dense(known.values(given, output))
    return found if found.dim() == 3 else found.unsqueeze(0)


def _by_rows(chain: ScanSequential, layer: nn.Module, given: Tensor) -> Tensor:
    def one(sample: Tensor) -> Tensor:
        output: Tensor = layer(sample.unsqueeze(0).clone())
        return output.flatten()

    try:
        jacobians: Tensor = torch.func.vmap(torch.func.jacrev(one))(given)
    except (RuntimeError, ValueError) as error:
        raise PenstockError(
            f"ScanSequential: torch.func cannot compute the Jacobian of {_named(chain, layer)}: {error}. Expected a "
            "layer that treats each sample by itself, draws nothing (BatchNorm and Dropout do in evaluation mode), and "
            "does not look at values. Put it before or behind the chain, or use torch.nn.Sequential"
        ) from error
    return jacobians.flatten(2).transpose(1, 2)


def _check_jacobian(chain: ScanSequential, layer: nn.Module, given: Tensor, jacobian: Tensor) -> None:
    """Raises `PenstockError` for a shape seen first whose `jacobian` is not what autograd computes for `layer`."""
    key = layer, given.shape
    if key in chain.checked:
        return
    with torch.enable_grad():
        leaf = given.detach().requires_grad_()
        output = layer(leaf.clone())
    generator = torch.Generator().manual_seed(0)
    gradient = torch.rand(output.shape, generator=generator, dtype=torch.float64).to(output)
    expected = torch.zeros_like(leaf)
    if output.requires_grad:
        (found,) = torch.autograd.grad(output, leaf, gradient, allow_unused=True)
        expected = expected if found is None else found
    found = (jacobian @ gradient.flatten(1).unsqueeze(-1)).reshape(given.shape)
    difference, largest = (found - expected).abs().amax(), expected.abs().amax()
    if difference > torch.finfo(found.dtype).eps ** 0.5 * (1 + largest):
        raise PenstockError(
            f"ScanSequential: {_named(chain, layer)}: expected the gradient that autograd computes for a batch of "
            f"shape {tuple(given.shape)}, found one that differs by {float(difference):.3g}. A Jacobian is that of one "
            "sample: the layer mixes samples, draws random numbers, or changes what it reads. Put it before or behind "
            "the chain, or use torch.nn.Sequential"
        )
    chain.checked.add(key)


def _named(chain: ScanSequential, layer: nn.Module) -> str:
    name = next(name for name, child in chain.named_children() if child is layer)
    return f"layer {name} ({type(layer).__name__})"


def _check_size(values: Sequence[Tensor], most_bytes: int) -> None:
    if len(values[-1]) == 0:
        return
    shapes = [(given[0].numel(), output[0].numel()) for given, output in pairwise(values)]
    every = list(shapes)

    def then(earlier: tuple[int, int], later: tuple[int, int]) -> tuple[int, int]:
        every.append((later[0], earlier[1]))
        return every[-1]

    scan_list([(values[-1][0].numel(), 1), *reversed(shapes)], then)
    needed = len(values[-1]) * values[-1].element_size() * sum(rows * columns for rows, columns in every)
    if needed > most_bytes:
        raise PenstockError(
            f"ScanSequential: the Jacobians of this batch and their products would take up to {needed:,} bytes: "
            f"expected at most {most_bytes:,} (most_bytes=). Use torch.nn.Sequential for layers this wide, smaller "
            "batches, or a larger most_bytes"
        )
