"""Tensors of subclasses, taken apart: the plain tensors inside of each one, and what else it was made of.

A subclass that wraps other tensors may have few operators: torchao's states of optimizers cannot be cloned. It says
what it wraps by ``__tensor_flatten__``, the protocol of `torch.compile`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.torch_internals.pytrees import tree_map_only
from penstock.torch_internals.unimported import PLAIN, is_dtensor


class TensorParts(NamedTuple):
    """A tensor of a subclass, taken apart: a tuple for functions of nested values."""

    kind: str
    """The module and the name of its class."""
    context: Any
    """What it is made of beside tensors; the attributes of one that wraps none."""
    tensors: dict[str, Any]
    """By attribute; one without a name if it has its numbers itself."""
    layout: tuple[tuple[int, ...], tuple[int, ...]]
    """Its size and its strides."""


def wraps_tensors(value: object) -> bool:
    """Whether `value` is a tensor that holds others in place of numbers; a `DTensor` is none here."""
    flatten = getattr(type(value), "__tensor_flatten__", None)
    return isinstance(value, Tensor) and callable(flatten) and not is_dtensor(value)


def packs(value: object) -> bool:
    """Whether `value` is a parameter of a class that packs numbers when it is moved to a device: one with a ``to`` of
    its own, such as those of bitsandbytes. Its constructor takes numbers, and its attributes by their names.
    """
    ordinary = type(value) in PLAIN or is_dtensor(value) or wraps_tensors(value)
    return isinstance(value, nn.Parameter) and not ordinary and type(value).to is not Tensor.to


def packed(values: Tensor, like: Tensor, scales: Mapping[str, Tensor] | None = None) -> Any:
    """`values` as a parameter that `packs`, like `like`, on their device. `scales`: if they are packed already."""
    kind: Any = type(like)
    make = getattr(kind, "from_prequantized", None)
    if scales is not None and make is not None:
        given = {"data": values, "quantized_stats": dict(scales), "device": values.device}
        return make(**given, requires_grad=like.requires_grad)
    known = {key: scale for key, scale in (scales or {}).items() if key in vars(like)}
    return kind(values, requires_grad=like.requires_grad, **{**vars(like), **known}).to(values.device)


def taken_apart(value: Any, where: str = "a tensor") -> Any:
    """`value`, or its parts if it is a tensor of a subclass. `CheckpointError` that names `where` if it has none."""
    if not isinstance(value, Tensor) or is_dtensor(value) or type(value) in PLAIN:
        return value
    kind, layout = f"{type(value).__module__}.{type(value).__qualname__}", (tuple(value.shape), value.stride())
    if wraps_tensors(value):
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return TensorParts(kind, context, {name: taken_apart(getattr(value, name), where) for name in names}, layout)
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise CheckpointError(
            f"{where} is a tensor of the class {kind} without __tensor_flatten__: expected one that says which tensors "
            "it holds. Give it __tensor_flatten__ and __tensor_unflatten__"
        )
    return TensorParts(kind, vars(value), {"": value.as_subclass(Tensor)}, layout)


def put_together(values: Any) -> Any:
    """Nested `values` with the tensors that `taken_apart` made parts of."""
    return tree_map_only(TensorParts, _joined, values, is_leaf=lambda value: isinstance(value, TensorParts))


def _joined(parts: TensorParts) -> Any:
    kind, inner = subclass_named(parts.kind), put_together(parts.tensors)
    if "" not in inner:
        return kind.__tensor_unflatten__(inner, parts.context, torch.Size(parts.layout[0]), parts.layout[1])
    plain = inner[""].as_subclass(kind)
    vars(plain).update(parts.context)
    return plain


def plain_tensors(value: Any) -> list[Any]:
    """The tensors that `value` wraps, taken apart or not, at any depth; itself if it wraps none."""
    parts = taken_apart(value) if wraps_tensors(value) else value
    inner = parts.tensors.values() if isinstance(parts, TensorParts) else ()
    return [plain for each in inner for plain in plain_tensors(each)] if inner else [parts]


def form_of(value: Any) -> str:
    """What a tensor must have in common with one whose numbers it takes over."""
    parts = taken_apart(value) if wraps_tensors(value) else value
    made = f"{parts.kind} {parts.context} of " if isinstance(parts, TensorParts) else ""
    return made + ", ".join(f"{tuple(plain.shape)} {plain.dtype}" for plain in plain_tensors(parts))


def subclass_named(name: str) -> Any:
    """The newest class of tensors of that module and name in this process: nothing is imported."""
    left: list[type] = [Tensor]
    while left:
        found = left.pop()
        if f"{found.__module__}.{found.__qualname__}" == name:
            return found
        left += found.__subclasses__()
    raise CheckpointError(
        f"the state has a tensor of {name}: expected a subclass of torch.Tensor in this process. Import its module"
    )
