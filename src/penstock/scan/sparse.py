"""Transposed Jacobians of layers as sparse matrices, and their products with the index work done once.

Which entries may differ from zero follows from the architecture alone, so the pattern of a Jacobian and that of a
product of Jacobians are found once, before training. After that a product is a gather, a multiplication and a sum.
Source: Wang, Bai and Pekhimenko, MLSys 2020, section 4.2 and appendix D, whose algorithms are for 3 x 3 convolutions;
here any kernel, stride, padding, dilation and number of groups is taken.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import PenstockError


@dataclass(frozen=True, eq=False)
class Pattern:
    """Where a matrix may have entries, row by row, without doubles."""

    shape: tuple[int, int]
    rows: Tensor
    columns: Tensor

    @property
    def entries(self) -> int:
        """How many."""
        return len(self.rows)

    @property
    def sparsity(self) -> float:
        """The share of the matrix that is always zero."""
        return 1 - self.entries / (self.shape[0] * self.shape[1])

    @cached_property
    def starts(self) -> Tensor:
        """The first entry of each row, and their number at the end."""
        counts = torch.bincount(self.rows, minlength=self.shape[0])
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    def dense(self, values: Tensor) -> Tensor:
        """The matrices (..., rows, columns) with `values` (..., entries)."""
        found = values.new_zeros(*values.shape[:-1], *self.shape)
        found[..., self.rows.to(values.device), self.columns.to(values.device)] = values
        return found

    def apply(self, values: Tensor, vectors: Tensor) -> Tensor:
        """The products with `vectors` (B, columns); `values` are (entries) or (B, entries)."""
        found = vectors.new_zeros(len(vectors), self.shape[0])
        rows, columns = self.rows.to(vectors.device), self.columns.to(vectors.device)
        return found.index_add_(1, rows, values * vectors[:, columns])


class SymbolicProduct:
    """The product of a matrix of pattern `left` and one of pattern `right`, for any values."""

    def __init__(self, left: Pattern, right: Pattern) -> None:
        if left.shape[1] != right.shape[0]:
            raise PenstockError(
                f"a product of a matrix {left.shape} and a matrix {right.shape}: expected as many rows on the right as "
                "columns on the left. Give Jacobians of neighbouring layers"
            )
        # Each entry on the left meets all entries of one row on the right.
        meets = right.starts[left.columns + 1] - right.starts[left.columns]
        self._left = torch.repeat_interleave(meets)
        ends = meets.cumsum(0)
        within = torch.arange(len(self._left)) - (ends - meets)[self._left]
        self._right = right.starts[left.columns][self._left] + within
        places = left.rows[self._left] * right.shape[1] + right.columns[self._right]
        found, self._target = torch.unique(places, return_inverse=True)
        self.pattern = Pattern((left.shape[0], right.shape[1]), found // right.shape[1], found % right.shape[1])
        """Of the product."""

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each pair of entries that meet."""
        return 2 * len(self._left)

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """The values of the product; those of the factors are (entries) or (B, entries)."""
        products = left[..., self._left.to(left.device)] * right[..., self._right.to(right.device)]
        found = products.new_zeros(*products.shape[:-1], self.pattern.entries)
        return found.index_add_(-1, self._target.to(products.device), products)


@dataclass(frozen=True, eq=False)
class LayerJacobian:
    """The transposed Jacobian of a layer, between flattened samples: inputs are rows, outputs are columns."""

    layer: nn.Module
    pattern: Pattern
    _weights: Tensor | None = field(default=None, repr=False)
    """By entry, the element of the weight that it is."""

    def values(self, inputs: Tensor, outputs: Tensor, weight: Tensor | None = None) -> Tensor:
        """The entries for a batch: (entries) where they are the same for all samples, else (B, entries).

        `weight`: in place of the one that the layer has now.
        """
        layer, flat = self.layer, outputs.unsqueeze(-1).flatten(1)
        match layer:
            case nn.Conv2d() | nn.Linear():
                assert self._weights is not None
                used = (layer.weight if weight is None else weight).detach()
                return used.flatten()[self._weights.to(used.device)]
            case nn.Identity() | nn.Flatten():
                return flat.new_ones(self.pattern.entries)
            case nn.ReLU():
                return (flat > 0).to(flat.dtype)
            case nn.Tanh():
                return 1 - flat * flat
            case nn.Sigmoid():
                return flat * (1 - flat)
            case nn.AvgPool2d():
                size = torch.tensor(_both(layer.kernel_size))
                return flat.new_full((self.pattern.entries,), 1 / int(size.prod()))
            case nn.MaxPool2d():
                _, chosen = functional.max_pool2d(
                    inputs, layer.kernel_size, layer.stride, layer.padding, return_indices=True
                )
                area = inputs.shape[-1] * inputs.shape[-2]
                channels = torch.arange(inputs.shape[1], device=inputs.device).view(-1, 1, 1) * area
                rows, columns = self.pattern.rows.to(inputs.device), self.pattern.columns.to(inputs.device)
                return ((chosen + channels).flatten(1)[:, columns] == rows).to(flat.dtype)
        raise AssertionError("layer_jacobian knows the layer")


def layer_jacobian(layer: nn.Module, input_shape: tuple[int, ...], *, pruned: bool = False) -> LayerJacobian:
    """The transposed Jacobian of `layer` for one sample of `input_shape`, without the dimension of the batch.

    Knows Conv2d, Linear, MaxPool2d, AvgPool2d, ReLU, Tanh, Sigmoid, Flatten and Identity. `pruned`: leaves out the
    entries of weights that are zero, which must stay zero. Raises `PenstockError` for another layer.
    """
    # A class that derives from one of these may have a forward of its own.
    known = layer if type(layer).__module__.startswith("torch.nn.modules.") else nn.Module()
    match known:
        case nn.Conv2d():
            return _convolution(known, input_shape, _kept(known.weight, pruned))
        case nn.Linear() if len(input_shape) == 1:
            outputs, inputs = known.weight.shape
            kept = _kept(known.weight, pruned)
            return _sorted(known, (inputs, outputs), kept % inputs, kept // inputs, kept)
        case nn.MaxPool2d() | nn.AvgPool2d() if not _is_odd(known):
            return _pooling(known, input_shape)
        case nn.ReLU() | nn.Tanh() | nn.Sigmoid() | nn.Flatten() | nn.Identity():
            every = torch.arange(torch.Size(input_shape).numel())
            return LayerJacobian(known, Pattern((len(every), len(every)), every, every))
    raise PenstockError(
        f"the sparse Jacobian of {layer} for inputs {input_shape} is not known: expected Conv2d with zero padding, "
        "Linear of one dimension, MaxPool2d or AvgPool2d without ceil_mode, dilation or own divisor, ReLU, Tanh, "
        "Sigmoid, Flatten or Identity. ScanSequential takes any layer, with dense Jacobians"
    )


def _is_odd(layer: nn.MaxPool2d | nn.AvgPool2d) -> bool:
    if isinstance(layer, nn.MaxPool2d):
        return bool(layer.ceil_mode) or _both(layer.dilation) != (1, 1)
    padded = _both(layer.padding) != (0, 0) and not layer.count_include_pad
    return bool(layer.ceil_mode) or layer.divisor_override is not None or padded


def _both(sizes: int | tuple[int, ...]) -> tuple[int, int]:
    return (sizes, sizes) if isinstance(sizes, int) else (sizes[0], sizes[1])


def _axis(size: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> tuple[Tensor, Tensor, int]:
    """Along one dimension, the input that each output reads at each place of the kernel, whether it is one, and the
    number of outputs.
    """
    outputs = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    found = torch.arange(outputs).unsqueeze(1) * stride - padding + torch.arange(kernel) * dilation
    return found, (found >= 0) & (found < size), outputs


def _kept(weight: Tensor, pruned: bool) -> Tensor:
    """The elements of a weight that have entries, by their numbers."""
    flat = weight.detach().flatten().cpu()
    return flat.nonzero().squeeze(1) if pruned else torch.arange(len(flat))


def _along(dimension: int, dimensions: int, numbers: Tensor) -> Tensor:
    """`numbers` along `dimension`, of as many as `dimensions` says."""
    return numbers.view([-1 if each == dimension else 1 for each in range(dimensions)])


def _convolution(layer: nn.Conv2d, input_shape: tuple[int, ...], kept: Tensor) -> LayerJacobian:
    """`kept`: the elements of the weight that have entries."""
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        raise PenstockError(
            f"the sparse Jacobian of {layer} is not known: expected zero padding given as numbers. "
            "ScanSequential takes any layer, with dense Jacobians"
        )
    _, height, width = input_shape
    (ky, kx), (sy, sx), (py, px), (dy, dx) = map(
        _both, (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    )
    ys, y_inside, out_height = _axis(height, ky, sy, py, dy)
    xs, x_inside, out_width = _axis(width, kx, sx, px, dx)
    own = layer.in_channels // layer.groups
    # Dimensions: element of the weight, row and column of the output.
    weights = kept.view(-1, 1, 1)
    o, c, u, v = torch.unravel_index(weights, layer.weight.shape)
    y, x = _along(1, 3, torch.arange(out_height)), _along(2, 3, torch.arange(out_width))
    inside = y_inside[y, u] & x_inside[x, v]
    channel = o // (layer.out_channels // layer.groups) * own + c
    rows = (channel * height + ys[y, u]) * width + xs[x, v]
    columns = (o * out_height + y) * out_width + x
    shape = (torch.Size(input_shape).numel(), layer.out_channels * out_height * out_width)
    return _sorted(layer, shape, rows[inside], columns[inside], weights.expand_as(inside)[inside])


def _pooling(layer: nn.MaxPool2d | nn.AvgPool2d, input_shape: tuple[int, ...]) -> LayerJacobian:
    """All inputs that an output may read: which one a maximum is depends on the numbers."""
    channels, height, width = input_shape
    (ky, kx), (sy, sx), (py, px) = map(_both, (layer.kernel_size, layer.stride or layer.kernel_size, layer.padding))
    ys, y_inside, out_height = _axis(height, ky, sy, py)
    xs, x_inside, out_width = _axis(width, kx, sx, px)
    # Dimensions: channel, row and column of the output; row and column of the window.
    c = _along(0, 5, torch.arange(channels))
    y, x = _along(1, 5, torch.arange(out_height)), _along(2, 5, torch.arange(out_width))
    u, v = _along(3, 5, torch.arange(ky)), _along(4, 5, torch.arange(kx))
    inside = y_inside[y, u] & x_inside[x, v]
    rows = (c * height + ys[y, u]) * width + xs[x, v]
    columns = (c * out_height + y) * out_width + x
    inside, rows, columns = torch.broadcast_tensors(inside, rows, columns)  # type: ignore[no-untyped-call]
    shape = (torch.Size(input_shape).numel(), channels * out_height * out_width)
    return _sorted(layer, shape, rows[inside], columns[inside], None)


def _sorted(
    layer: nn.Module, shape: tuple[int, int], rows: Tensor, columns: Tensor, weights: Tensor | None
) -> LayerJacobian:
    order = torch.argsort(rows * shape[1] + columns)
    return LayerJacobian(
        layer, Pattern(shape, rows[order], columns[order]), None if weights is None else weights[order]
    )
