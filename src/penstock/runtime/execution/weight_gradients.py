"""Autograd's formulas for weight gradients, by operator.

An input backward leaves these gradients out, and the weight backward computes them later, from the inputs of the
operator and the gradient of its result. Every formula here is that of autograd, down to the order of its operands, so
the gradients have the same bits. The tests compare each formula with autograd, for every layout that it distinguishes.

Source: derivatives.yaml and FunctionsManual.cpp of PyTorch, which agree in 2.11 and 2.13 on these operators.

Laws of this file:
  1. A formula keeps values of its operator without history: nothing else of the graph stays alive.
  2. An operator in a form that has no formula here is left to autograd, never guessed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.torch_internals.autograd import gradient_shape, node_kinds, saved_value

_Formula: TypeAlias = Callable[[Tensor], Sequence[Tensor]]
"""Maps the gradient of an operator's result to the gradients of some of its arguments, in their order."""
_Arguments: TypeAlias = tuple[int, ...]
"""Indices of an operator's arguments, ascending; they are the indices of its edges in autograd's graph."""


def _always(node: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class _OperatorRule:
    """Describes how to defer the weight gradients of one type of node in autograd's graph."""

    slots: _Arguments
    """The arguments that may be weights."""
    read: Callable[[Any, _Arguments], _Formula]
    """Returns the formula for some arguments of a node whose saved tensors are still there."""
    accepts: Callable[[Any], bool] = _always
    """Whether the formula holds for this form of the node."""


def _read_addmm(node: Any, slots: _Arguments) -> _Formula:
    """``addmm(bias, first, second)``, as in linear layers."""
    products = _read_products(node, tuple(slot - 1 for slot in slots if slot > 0), "mat1")
    if 0 not in slots:
        return products
    bias, number = node.next_functions[0]
    shape = gradient_shape(bias, number)
    return lambda gradient: [gradient.sum_to_size(shape), *products(gradient)]


def _read_mm(node: Any, slots: _Arguments) -> _Formula:
    """``mm(first, second)``, to which PyTorch reduces most products of matrices."""
    return _read_products(node, slots, "self")


def _read_products(node: Any, slots: _Arguments, first_name: str) -> _Formula:
    """A product of two matrices. Each gradient is laid out like its matrix, if that is row- or column-major."""
    first = _value(node, first_name) if 1 in slots else None
    second = _value(node, "mat2") if 0 in slots else None
    turns_first = 0 in slots and _is_column_major(node, first_name)
    turns_second = 1 in slots and _is_column_major(node, "mat2")

    def formula(gradient: Tensor) -> list[Tensor]:
        found = []
        if second is not None:
            found.append(
                second.conj().mm(gradient.t()).t()
                if turns_first and _are_strided(gradient, second)
                else gradient.mm(second.t().conj())
            )
        if first is not None:
            found.append(
                gradient.t().mm(first.conj()).t()
                if turns_second and _are_strided(gradient, first)
                else first.t().conj().mm(gradient)
            )
        return found

    return formula


def _is_column_major(node: Any, name: str) -> bool:
    rows, _ = saved_value(node, f"{name}_sym_sizes")
    strides = saved_value(node, f"{name}_sym_strides")
    return bool(strides == (1, rows))


def _are_strided(*tensors: Tensor) -> bool:
    return all(tensor.layout is torch.strided for tensor in tensors)


def _has_plain_factors(node: Any) -> bool:
    return bool(saved_value(node, "alpha") == 1 and saved_value(node, "beta") == 1)


def _read_bmm(node: Any, slots: _Arguments) -> _Formula:
    """``bmm(first, second)``: a batch of products."""
    first = _value(node, "self") if 1 in slots else None
    second = _value(node, "mat2") if 0 in slots else None

    def formula(gradient: Tensor) -> list[Tensor]:
        found = []
        if second is not None:
            found.append(gradient.bmm(second.transpose(1, 2).conj()))
        if first is not None:
            found.append(first.transpose(1, 2).conj().bmm(gradient))
        return found

    return formula


def _read_convolution(node: Any, slots: _Arguments) -> _Formula:
    """``convolution(input, weight, bias, ...)`` of any number of dimensions, transposed or not."""
    read, weight = _value(node, "input"), _value(node, "weight")
    wanted = [False, 1 in slots, 2 in slots]
    names = ("bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    options = [saved_value(node, name) for name in names]

    def formula(gradient: Tensor) -> list[Tensor]:
        found = torch.ops.aten.convolution_backward(gradient, read, weight, *options, wanted)
        return [made for made, is_wanted in zip(found, wanted, strict=True) if is_wanted]

    return formula


def _read_embedding(node: Any, slots: _Arguments) -> _Formula:
    """``embedding(weight, indices)``."""
    indices, rows = _value(node, "indices"), saved_value(node, "weight_sym_argsize_0")
    # No padding is -1, which autograd shows as an unsigned number.
    padding = (saved_value(node, "padding_idx") + 2**63) % 2**64 - 2**63
    options = padding, saved_value(node, "scale_grad_by_freq"), saved_value(node, "sparse")
    return lambda gradient: [torch.ops.aten.embedding_backward(gradient, indices, rows, *options)]


def _value(node: Any, name: str) -> Tensor:
    """The tensor that autograd saved under `name`, without history."""
    saved: Tensor = saved_value(node, name)
    return saved.detach()


_KNOWN = {
    "AddmmBackward0": _OperatorRule((0, 1, 2), _read_addmm, _has_plain_factors),
    "MmBackward0": _OperatorRule((0, 1), _read_mm),
    "BmmBackward0": _OperatorRule((0, 1), _read_bmm),
    "ConvolutionBackward0": _OperatorRule((1, 2), _read_convolution),
    "EmbeddingBackward0": _OperatorRule((0,), _read_embedding),
}

OPERATORS = {kind: operator for name, operator in _KNOWN.items() for kind in node_kinds(name)}
"""The rules, by the type of a node in autograd's graph."""
