"""The oracle's own way to cut a batch, so that it shares no mistake with the runtime."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.capturing.chain import LayerChain
from penstock.capturing.samples import flatten
from penstock.torch_internals import pytrees as pytree

__all__ = ["ReferenceMicrobatch", "cut", "pieces_of", "sizes_of"]


@dataclass(frozen=True, slots=True)
class ReferenceMicrobatch:
    """Inputs by value name, the target, and how many samples they are of."""

    values: dict[str, Tensor]
    target: Any
    size: int


def cut(chain: LayerChain, inputs: Any, target: Any, count: int) -> list[ReferenceMicrobatch]:
    """The batch in `count` microbatches."""
    tensors = chain.inputs.read(inputs)
    samples = next(tensors[name].shape[0] for name in tensors if name in chain.inputs.batched)
    columns = {
        name: list(t.clone().tensor_split(count)) if name in chain.inputs.batched else [t] * count
        for name, t in tensors.items()
    }
    targets = pieces_of(target, samples, count)
    return [
        ReferenceMicrobatch({name: column[index] for name, column in columns.items()}, targets[index], size)
        for index, size in enumerate(sizes_of(samples, count))
    ]


def pieces_of(target: Any, samples: int, count: int) -> list[Any]:
    """`target` in `count` pieces; what does not count the samples goes whole to each."""
    leaves, structure = flatten(target)
    columns = [
        list(leaf.clone().tensor_split(count))
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == samples
        else [leaf] * count
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([column[index] for column in columns], structure) for index in range(count)]


def sizes_of(samples: int, count: int) -> list[int]:
    """So many samples in `count` parts; the first ones take the remainder."""
    return [samples // count + (index < samples % count) for index in range(count)]
