"""Tensors of subclasses, taken apart: the plain tensors inside of each one, and what else it was made of.

A subclass that wraps other tensors has few operators of its own: torchao's states of optimizers cannot be cloned. It
says what it wraps by ``__tensor_flatten__``, the protocol of `torch.compile`. Tried on torch 2.11 and 2.13.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.errors import CheckpointError
from penstock.torch_internals.pytrees import tree_map_only


class TensorParts(NamedTuple):
    """A tensor of a subclass, taken apart. For functions of nested values it is a tuple."""

    kind: str
    """The module and the name of its class."""
    context: Any
    """What it is made of beside tensors; the attributes of one that wraps none."""
    names: tuple[str, ...]
    """Of `tensors`; one empty name if it has its numbers itself."""
    tensors: tuple[Any, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]


def wraps_tensors(value: object) -> bool:
    """Whether `value` is a tensor that holds other tensors in place of numbers; a `DTensor` is none here."""
    flatten = getattr(type(value), "__tensor_flatten__", None)
    return isinstance(value, Tensor) and callable(flatten) and not isinstance(value, DTensor)


def taken_apart(value: Any, where: str = "a tensor") -> Any:
    """`value`, or its parts if it is a tensor of a subclass. `CheckpointError` that names `where` if it has none."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or type(value) in (Tensor, nn.Parameter):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if wraps_tensors(value):
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = tuple(taken_apart(getattr(value, name), f"{where}.{name}") for name in names)
        return TensorParts(kind, context, tuple(names), inner, tuple(value.shape), tuple(value.stride()))
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise CheckpointError(
            f"{where} is a tensor of the class {kind}, which has no __tensor_flatten__: expected one that says which "
            "tensors it holds, so that it can be kept. Give it __tensor_flatten__ and __tensor_unflatten__"
        )
    return TensorParts(kind, vars(value), ("",), (value.as_subclass(Tensor),), tuple(value.shape), value.stride())


def plain_tensors(value: Any) -> list[Any]:
    """The tensors that `value` wraps, at any depth, be it taken apart or not; `value` itself if it wraps none."""
    parts = taken_apart(value) if wraps_tensors(value) else value
    return (
        [plain for inner in parts.tensors for plain in plain_tensors(inner)] if type(parts) is TensorParts else [parts]
    )


def form_of(value: Any) -> str:
    """The shape and the type of `value`, be it taken apart or not, and what it is made of."""
    parts = taken_apart(value) if wraps_tensors(value) else value
    if type(parts) is not TensorParts:
        return f"{tuple(value.shape)} {value.dtype}"
    return f"{parts.kind} {parts.context} of {dict(zip(parts.names, map(form_of, parts.tensors), strict=True))}"


def put_together(values: Any) -> Any:
    """Nested `values` with the tensors of subclasses that `taken_apart` made parts of."""
    return tree_map_only(TensorParts, _joined, values, is_leaf=lambda value: isinstance(value, TensorParts))


def _joined(parts: TensorParts) -> Tensor:
    kind, inner = subclass_named(parts.kind), put_together(list(parts.tensors))
    if parts.names == ("",):
        plain: Tensor = inner[0].as_subclass(kind)
        vars(plain).update(parts.context)
        return plain
    made = dict(zip(parts.names, inner, strict=True))
    joined: Tensor = kind.__tensor_unflatten__(made, parts.context, torch.Size(parts.size), parts.stride)
    return joined


def subclass_named(name: str) -> Any:
    """The newest class of tensors with that module and name, of those that this process has: nothing is imported."""
    left: list[type] = [Tensor]
    while left:
        found = left.pop()
        if f"{found.__module__}.{found.__qualname__}" == name:
            return found
        left += found.__subclasses__()
    raise CheckpointError(
        f"the state has a tensor of the class {name}: expected it among the subclasses of torch.Tensor in this process. "
        "Import its module before the load"
    )
