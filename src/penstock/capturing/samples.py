"""The example inputs that a model is captured with, read leaf by leaf.

A sample says more than shapes: which arguments there are, which are constants, and which tensors hold one row for every
sample of the microbatch, so that a minibatch can be split and the graph be traced for any batch size.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from penstock.arguments import text_of
from penstock.capturing.model_forms import ModelInputs
from penstock.errors import CaptureError
from penstock.torch_internals import pytrees as pytree


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def copied(self) -> "Call":
        """The same with tensors of its own: a model may write in its inputs, and they are the user's."""
        args, kwargs = pytree.tree_map_only(Tensor, _copy_tensor, (self.args, dict(self.kwargs)))
        return Call(args, kwargs)


def read_sample(sample: Any, microbatch_size: int | None = None) -> tuple[Call, ModelInputs]:
    """The call that `sample` stands for and its form.

    `sample`: a tuple or list of positional arguments, a mapping of keyword arguments, or one tensor or dataclass.
    `microbatch_size`: samples in it; by default dimension 0 of its first tensor that has dimensions. The tensors
    with this size in dimension 0 are the batched ones. Raises `CaptureError` if there are none, and for what holds
    arrays that cannot be split.
    """
    match sample:
        case Tensor():
            call = Call((sample,), {})
        case Mapping():
            call = Call((), dict(sample))
        case tuple() | list():
            call = Call(tuple(sample), {})
        case _ if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
            call = Call((sample,), {})
        case _:
            raise CaptureError(
                "sample=: expected a tuple of positional arguments, a dict of keyword arguments or one tensor, found "
                f"{text_of(sample)}: write sample=(value,) if the model takes it as its only argument"
            )
    leaves, structure = flatten((call.args, call.kwargs))
    paths = [path for path, _ in pytree.tree_leaves_with_path((call.args, call.kwargs))]
    names = tuple(_leaf_name(path) for path in paths)
    pairs = list(zip(names, leaves, strict=True))
    check_leaves(pairs)
    for name, leaf in pairs:
        if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.is_quantized):
            check_dense(f"sample=, {name}", leaf)
    rows = {name: leaf.size(0) for name, leaf in pairs if isinstance(leaf, Tensor) and leaf.dim() > 0}
    sizes = list(rows.values())
    size = microbatch_size if microbatch_size is not None else next(iter(sizes), 0)
    if size < 1 or size not in sizes:
        raise CaptureError(
            f"sample= needs a tensor whose dimension 0 counts samples ({microbatch_size=}), found dimensions 0 of "
            f"{sizes}: pass at least one batched tensor with at least one sample"
        )
    inputs = ModelInputs(
        names=names,
        structure=structure,
        constants={name: leaf for name, leaf in pairs if not isinstance(leaf, Tensor)},
        batched=frozenset(name for name, count in rows.items() if count == size),
        microbatch_size=size,
        whole_rows={name: count for name, count in rows.items() if count != size},
    )
    return call, inputs


def check_leaves(leaves: Iterable[tuple[str, Any]]) -> None:
    """Raises `CaptureError` for a leaf (name, value) that holds arrays where Penstock does not look: they could neither
    be split nor change from step to step.
    """
    for name, leaf in leaves:
        if isinstance(leaf, Mapping | numpy.ndarray):
            way = "dict(...) of it"
            if isinstance(leaf, numpy.ndarray):
                way = ".tolist() of it" if leaf.dtype.hasobject else "torch.from_numpy(...) of it"
            raise CaptureError(f"{name} is a {type(leaf).__name__}, which cannot be cut into microbatches: pass {way}")


def check_dense(name: str, tensor: Tensor) -> None:
    """Raises `CaptureError` for a tensor that cannot be cut into microbatches because of how it holds its numbers."""
    if tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized):
        return
    kind, fix = (
        ("nested", "tensor.to_padded_tensor(0.0), with a mask where the model needs one")
        if tensor.is_nested
        else ("quantized", "tensor.dequantize()")
        if tensor.is_quantized
        else (f"sparse ({tensor.layout})", "tensor.to_dense()")
    )
    raise CaptureError(
        f"{name}: expected a dense tensor, found a {kind} one, which cannot be cut into microbatches: pass {fix}"
    )


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves and the structure of `tree`; dataclasses in it are made known to PyTorch's pytree on the way.

    `is_leaf`: whether a container is a leaf.
    """
    while True:
        leaves, structure = pytree.tree_flatten(tree, is_leaf)
        unknown = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)}
        if not unknown:
            return leaves, structure
        for kind in unknown:
            torch.export.register_dataclass(kind)


def _copy_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _leaf_name(path: Sequence[Any]) -> str:
    """``args[0]`` or ``kwargs['mask']``, with what leads to the leaf inside that argument."""
    side = "kwargs" if path[0].idx else "args"
    return side + pytree.keystr(tuple(path[1:]))
