"""Cuts a batch into microbatches for the oracle, which shares no code with the runtime here, and so no mistakes."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from penstock.capturing.model_forms import ModelInputs
from penstock.capturing.samples import flatten
from penstock.torch_internals import pytrees as pytree
from penstock.training.losses import Microbatches


@dataclass(frozen=True, slots=True)
class ReferenceMicrobatch:
    """Holds the inputs of a microbatch by value name, its target, and its number of samples."""

    values: dict[str, Tensor]
    target: Any
    size: int


def cut(
    spec: ModelInputs, inputs: Any, target: Any, count: int, *, own_target: bool = False
) -> list[ReferenceMicrobatch]:
    """The `count` microbatches of a batch; those that the user has cut are taken as they are.

    `own_target`: the batch is also the target.
    """
    if isinstance(inputs, Microbatches):
        targets = [None] * count if inputs.targets is None else inputs.targets
        pairs = list(zip(inputs.inputs, targets, strict=True))
        return [part for batch, own in pairs for part in cut(spec, batch, own, 1, own_target=own_target)]
    if own_target:
        target = dict(inputs) if isinstance(inputs, Mapping) else inputs
    tensors = spec.read(inputs)
    samples = next(tensors[name].shape[0] for name in tensors if name in spec.batched)
    columns = {
        name: list(t.clone().tensor_split(count)) if name in spec.batched else [t] * count
        for name, t in tensors.items()
    }
    targets = pieces_of(target, samples, count)
    for size in set(sizes_of(samples, count)):
        spec.check_samples(size, tensors)
    return [
        ReferenceMicrobatch({name: column[index] for name, column in columns.items()}, targets[index], size)
        for index, size in enumerate(sizes_of(samples, count))
    ]


def pieces_of(target: Any, samples: int, count: int) -> list[Any]:
    """`target` in `count` pieces; each piece has the whole of every leaf that is not one entry per sample.

    A list of one entry per sample, in which no tensor has all samples, is a leaf.
    """

    def is_rows(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == samples

    def is_list(node: Any) -> bool:
        return type(node) in (list, tuple) and len(node) == samples and not any(map(is_rows, pytree.tree_leaves(node)))

    leaves, structure = flatten(target, is_list)
    starts = [sum(sizes_of(samples, count)[:index]) for index in range(count + 1)]
    columns = [
        list(leaf.clone().tensor_split(count))
        if is_rows(leaf)
        else [leaf[start:stop] for start, stop in pairwise(starts)]
        if is_list(leaf)
        else [leaf] * count
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([column[index] for column in columns], structure) for index in range(count)]


def sizes_of(samples: int, count: int) -> list[int]:
    """The sizes of `count` pieces of `samples` samples; the first ones take the remainder."""
    return [samples // count + (index < samples % count) for index in range(count)]
