"""The operators whose weights' gradients can wait, and how autograd computes these.

A split backward leaves them out where autograd would compute them, and computes them later from what the operator read
and the gradient of its result. So every formula here is that of autograd, down to the order of its operands: the later
gradients have the same bits. The tests hold each of them against autograd, for every layout that it distinguishes.

Source: derivatives.yaml and FunctionsManual.cpp of PyTorch, which are the same in 2.11 and 2.13 as far as they go here.

Laws of this file:
  1. What a formula keeps of its operator is values without history: nothing else of the graph stays alive.
  2. An operator in a form that has no formula here is left to autograd, never guessed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.torch_internals.autograd import gradient_shape, node_kinds, saved_value

__all__ = ["OPERATORS", "Formula", "Operator", "Slots"]

Formula: TypeAlias = Callable[[Tensor], Sequence[Tensor]]
"""Of the gradient of an operator's result: those of the arguments that it was made for, in their order."""
Slots: TypeAlias = tuple[int, ...]
"""Numbers of arguments of an operator, ascending; of their edges in autograd's graph, that is."""


def _always(node: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Operator:
    """What is known of one type of node in autograd's graph."""

    slots: Slots
    """The arguments that may be weights."""
    read: Callable[[Any, Slots], Formula]
    """Of a node whose saved tensors are still there: the formula for some of its arguments."""
    accepts: Callable[[Any], bool] = _always
    """Whether a node is of a form that the formula holds for."""


def _read_addmm(node: Any, slots: Slots) -> Formula:
    """``addmm(bias, first, second)``, which linear layers are."""
    products = _read_products(node, tuple(slot - 1 for slot in slots if slot > 0), "mat1", "mat2")
    if 0 not in slots:
        return products
    bias, number = node.next_functions[0]
    shape = gradient_shape(bias, number)
    return lambda gradient: [gradient.sum_to_size(shape), *products(gradient)]


def _read_mm(node: Any, slots: Slots) -> Formula:
    """``mm(first, second)``, which matrix products of any number of dimensions come down to."""
    return _read_products(node, slots, "self", "mat2")


def _read_products(node: Any, slots: Slots, first_name: str, second_name: str) -> Formula:
    """Of a product of two matrices. Each gradient is laid out like its matrix, if that is row- or column-major."""
    first = _value(node, first_name) if 1 in slots else None
    second = _value(node, second_name) if 0 in slots else None
    turns_first = 0 in slots and _is_column_major(node, first_name)
    turns_second = 1 in slots and _is_column_major(node, second_name)

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


def _read_bmm(node: Any, slots: Slots) -> Formula:
    """``bmm(first, second)``: products of equally many matrices."""
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


def _read_convolution(node: Any, slots: Slots) -> Formula:
    """``convolution(input, weight, bias, ...)`` of any number of dimensions, transposed or not."""
    read, weight = _value(node, "input"), _value(node, "weight")
    wanted = [False, 1 in slots, 2 in slots]
    names = ("bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    options = [saved_value(node, name) for name in names]

    def formula(gradient: Tensor) -> list[Tensor]:
        found = torch.ops.aten.convolution_backward(gradient, read, weight, *options, wanted)
        return [made for made, is_wanted in zip(found, wanted, strict=True) if is_wanted]

    return formula


def _read_embedding(node: Any, slots: Slots) -> Formula:
    """``embedding(weight, indices)``."""
    indices, rows = _value(node, "indices"), saved_value(node, "weight_sym_argsize_0")
    # No padding is -1, which is shown without its sign.
    padding = (saved_value(node, "padding_idx") + 2**63) % 2**64 - 2**63
    options = padding, saved_value(node, "scale_grad_by_freq"), saved_value(node, "sparse")
    return lambda gradient: [torch.ops.aten.embedding_backward(gradient, indices, rows, *options)]


def _value(node: Any, name: str) -> Tensor:
    """What autograd saved under `name`, without the history that it comes with."""
    saved: Tensor = saved_value(node, name)
    return saved.detach()


_KNOWN = {
    "AddmmBackward0": Operator((0, 1, 2), _read_addmm, _has_plain_factors),
    "MmBackward0": Operator((0, 1), _read_mm),
    "BmmBackward0": Operator((0, 1), _read_bmm),
    "ConvolutionBackward0": Operator((1, 2), _read_convolution),
    "EmbeddingBackward0": Operator((0,), _read_embedding),
}

OPERATORS = {kind: operator for name, operator in _KNOWN.items() for kind in node_kinds(name)}
"""By the type of their nodes in autograd's graph."""
