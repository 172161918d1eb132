"""The parts of a target that hold one entry for every sample, and are cut into microbatches with the inputs.

These are tensors with as many entries in dimension 0 as the batch has samples, and lists and tuples of as many entries.
Where a list of that length holds tensors of that length, its entries are parts of the target, and are cut themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.capturing.samples import check_dense, check_leaves, flatten
from penstock.errors import PenstockError
from penstock.torch_internals import pytrees as pytree


@dataclass(frozen=True, slots=True, eq=False)
class TargetForm:
    """The structure of a target, in which a list of one entry per sample is a leaf."""

    structure: pytree.TreeSpec
    cut: tuple[bool, ...]
    """For every leaf: whether it has one entry for every sample."""

    def pieces(self, target: Any, spans: Sequence[range]) -> list[Any]:
        """`target` for the samples in each of `spans`, which are consecutive; each has the other leaves whole."""
        # Most targets are one tensor, and looking through a tree takes longer than the rest.
        if self is _ONE_TENSOR:
            return list(rows_of(target, spans))
        leaves = self.structure.flatten_up_to(target)
        columns = [
            _pieces(leaf, spans) if cut else [leaf] * len(spans) for leaf, cut in zip(leaves, self.cut, strict=True)
        ]
        return [
            pytree.tree_unflatten([column[index] for column in columns], self.structure) for index in range(len(spans))
        ]

    def join(self, parts: Sequence[Any]) -> Any:
        """Consecutive pieces as one target."""
        columns = zip(*map(self.structure.flatten_up_to, parts), strict=True)
        leaves = [_joined(column) if cut else column[0] for column, cut in zip(columns, self.cut, strict=True)]
        return pytree.tree_unflatten(leaves, self.structure)


def read_target(target: Any, samples: int, *, is_cut: bool) -> TargetForm:
    """The form of `target` for a batch of `samples`. Raises `PenstockError` if it cannot be cut. `is_cut`: whether it
    will be.
    """
    if isinstance(target, Tensor):
        check_dense("the target", target)
        if _is_batched(target, samples):
            return _ONE_TENSOR
    leaves, structure = flatten(target, lambda node: _is_list_of_samples(node, samples, is_cut))
    cut = tuple([_has_rows(leaf, samples) for leaf in leaves])
    rest = [leaf for leaf in leaves if not isinstance(leaf, list | tuple)]
    check_leaves(("the target, or a part of it,", leaf) for leaf in rest)
    tensors = [leaf for leaf in rest if isinstance(leaf, Tensor)]
    for tensor in tensors:
        check_dense("the target", tensor)
    if tensors and not any(cut):
        raise PenstockError(
            f"the target has dimension 0 of {[leaf.shape[0] if leaf.ndim else None for leaf in tensors]} and the "
            f"inputs hold {samples} samples: pass one target for every sample"
        )
    return TargetForm(structure, cut)


def rows_of(tensor: Tensor, spans: Sequence[range]) -> Sequence[Tensor]:
    """Views of the rows of `tensor` in each of `spans`, which are consecutive."""
    if not tensor.requires_grad and spans[0].start == 0 and spans[-1].stop == len(tensor):
        return tensor.split_with_sizes([len(span) for span in spans])
    # Autograd forbids writing to a view that is one of several outputs of a call.
    return [tensor.narrow(0, span.start, len(span)) for span in spans]


_ONE_TENSOR = TargetForm(flatten(0)[1], (True,))


def _pieces(leaf: Any, spans: Sequence[range]) -> Sequence[Any]:
    return rows_of(leaf, spans) if isinstance(leaf, Tensor) else [leaf[span.start : span.stop] for span in spans]


def _joined(column: Sequence[Any]) -> Any:
    return torch.cat(list(column)) if isinstance(column[0], Tensor) else sum(column[1:], column[0])


def _has_rows(leaf: Any, samples: int) -> bool:
    """Whether `leaf` has one entry for every sample; a list is a leaf only if it has."""
    return _is_batched(leaf, samples) if isinstance(leaf, Tensor) else type(leaf) in (list, tuple)


def _is_batched(tensor: Tensor, samples: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == samples


def _is_list_of_samples(node: Any, samples: int, is_cut: bool) -> bool:
    """Whether `node` is a list or a tuple of one entry for every sample. Raises `PenstockError` if that is not clear
    and it `is_cut`.
    """
    if type(node) not in (list, tuple) or len(node) != samples:
        return False
    tensors = [leaf for leaf in pytree.tree_leaves(node) if isinstance(leaf, Tensor)]
    batched = sum(_is_batched(tensor, samples) for tensor in tensors)
    if is_cut and 0 < batched < len(tensors):
        raise PenstockError(
            f"the target: expected a list of one entry for every sample, or of tensors with all samples, found a "
            f"{type(node).__name__} of {samples} entries for {samples} samples, in which {batched} of {len(tensors)} "
            "tensors have as many rows: it is not clear what to cut. Cut the batch yourself, "
            "pipe.step(penstock.Microbatches(inputs, targets)), or pass parts of the target in a dict"
        )
    return batched == 0
