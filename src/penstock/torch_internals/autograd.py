"""Autograd: a backward without a second look at its arguments, what the nodes of its graph saved, and its profiler.

PyTorch documents the edges of a node, its name and its hooks. A split backward (`runtime/execution/split_backward.py`)
also needs the types of nodes, what they saved, and their order.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable, profiler
from torch.autograd.graph import GradientEdge

from penstock.torch_internals.availability import missing

_PURPOSE = "to split a backward into an input and a weight backward"


def node_kinds(*names: str) -> tuple[type, ...]:
    """The types of the nodes with these names in autograd's graph, as far as this PyTorch has them.

    Public: the name of a node, ``type(node).__name__``. To look every node up by its name makes a walk over the graph
    half as long again, since C++ makes the string anew each time. A type that is not there is left out: nodes of that
    name cannot occur.
    """
    kinds = getattr(torch._C, "_functions", None)
    if kinds is None:
        raise missing("torch._C._functions", _PURPOSE)
    found = (getattr(kinds, name, None) for name in names)
    return tuple(kind for kind in found if kind is not None)


_LEAF_NODES: tuple[Any, ...] = node_kinds("AccumulateGrad")


def leaves_behind(tensor: Tensor, ends: Iterable[Any] = ()) -> Iterator[Tensor]:
    """The leaves of autograd that `tensor` was computed from, without those behind the nodes `ends`."""
    seen: set[Any] = {*ends, None}
    waiting: list[Any] = [tensor.grad_fn]
    if tensor.is_leaf and tensor.requires_grad:
        yield tensor
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, _LEAF_NODES):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]


def run_backward(roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Adds the gradients of the leaves behind `roots` to their ``.grad``, from the `gradients` there.

    Public: `torch.autograd.backward`, which does the same once it has looked through its arguments. Here these are
    right already. Without that look an action of `nano` in benchmarks/overhead.py takes 12 % less. Without the private
    name: the public way.
    """
    engine = getattr(Variable, "_execution_engine", None)
    if engine is None:
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
        return
    engine.run_backward(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def saved_value(node: Any, name: str) -> Any:
    """What `node` saved in the forward under `name`, which is that of derivatives.yaml.

    Public: hooks on saved tensors, which see them without their names, and no numbers.
    """
    try:
        return getattr(node, f"_saved_{name}")
    except AttributeError as error:
        raise missing(f"{type(node).__name__}._saved_{name}", _PURPOSE) from error


def gradient_shape(node: Any, number: int) -> torch.Size:
    """The shape of the gradient that `node` takes at its input `number`.

    Public: a leaf has its variable; other nodes have no public shape.
    """
    try:
        shape: torch.Size = node._input_metadata[number].shape
    except AttributeError as error:
        leaf = getattr(node, "variable", None)
        if leaf is None:
            raise missing(f"{type(node).__name__}._input_metadata", _PURPOSE) from error
        shape = leaf.shape
    return shape


def sequence_number(node: Any) -> int:
    """A number that grows from node to node in the order in which their operators ran. No public name has it."""
    try:
        return int(node._sequence_nr())
    except AttributeError as error:
        raise missing(f"{type(node).__name__}._sequence_nr", _PURPOSE) from error


def is_profiling() -> bool:
    """Whether `torch.profiler`, `emit_nvtx` or `emit_itt` of this process is active, so that labels are recorded.

    Public: nothing tells. `torch.profiler.record_function` costs 2 to 5 us for each label without a profiler, too, and
    an action of a small stage takes 20. Without the private name: True, and labels are always recorded.
    """
    return bool(getattr(profiler, "_is_profiler_enabled", True))
