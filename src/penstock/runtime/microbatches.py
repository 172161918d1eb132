"""A minibatch cut into microbatches.

Every rank cuts its own copy of the batch in the same way, so a microbatch needs no message: only what the model
computes travels. Where the batch does not divide evenly the first microbatches take one sample more, and each
microbatch weighs as many samples as it has, so that the loss and its gradient stay means over samples.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.capturing.chain import ModelInputs
from penstock.errors import PenstockError

__all__ = ["Microbatch", "arguments", "chunks", "join", "share_sizes", "split", "take_part"]


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """The part of a minibatch that goes through the pipeline as one."""

    inputs: Mapping[str, Tensor]
    """The model's input tensors by value name."""
    target: Any
    samples: int
    total: int
    """The samples of the minibatch."""
    signature: Hashable
    """The shapes and types of the inputs of the whole microbatch: what decides the shapes of everything that the stages
    exchange.
    """
    whole: int
    """The samples of the whole microbatch, of which this is a part where replicas split it."""
    part: int = 0

    @property
    def weight(self) -> float:
        """Its share of the minibatch's samples."""
        return self.samples / self.total

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of the inputs and the target that is a tensor."""
        leaves = [*self.inputs.values(), *pytree.tree_leaves(self.target)]
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`inputs` as ``(args, kwargs)``: a tuple is positional arguments, a mapping is keywords, all else one argument."""
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs,), {}


def split(form: ModelInputs, inputs: Any, target: Any, count: int, parts: int = 1) -> tuple[Microbatch, ...]:
    """`inputs` and `target` as `count` microbatches, which replicas will cut into at most `parts` parts each.

    Tensors whose dimension 0 counts the samples are cut along it (views, no copies); everything else goes whole to
    every microbatch. `PenstockError` if the sizes disagree or there are fewer samples than microbatches or parts.
    """
    tensors = form.bind(*arguments(inputs))
    samples = _samples(form, tensors)
    if samples < count:
        raise PenstockError(
            f"a minibatch of {samples} sample(s) cannot be cut into {count} microbatches: pass at least {count} "
            f"samples, or build the Pipeline with microbatches={max(samples, 1)} or fewer"
        )
    if samples // count < parts:
        raise PenstockError(
            f"a minibatch of {samples} sample(s) makes microbatches of {samples // count}, which {parts} replicas of a "
            f"stage cannot split: pass at least {count * parts} samples, or plan with fewer microbatches or replicas"
        )
    _check_target(target, samples)
    made, start = [], 0
    for size in share_sizes(samples, count):
        cut = {name: t.narrow(0, start, size) if name in form.batched else t for name, t in tensors.items()}
        made.append(
            Microbatch(
                inputs=cut,
                target=_narrow(target, samples, start, size),
                samples=size,
                total=samples,
                signature=tuple((name, tuple(t.shape), t.dtype) for name, t in cut.items()),
                whole=size,
            )
        )
        start += size
    return tuple(made)


def take_part(form: ModelInputs, microbatch: Microbatch, part: int, parts: int) -> Microbatch:
    """Part `part` of the `parts` that the replicas of a stage make of `microbatch`."""
    if parts == 1:
        return microbatch
    samples = microbatch.samples
    sizes = share_sizes(samples, parts)
    start, size = sum(sizes[:part]), sizes[part]
    tensors = microbatch.inputs
    return replace(
        microbatch,
        inputs={name: t.narrow(0, start, size) if name in form.batched else t for name, t in tensors.items()},
        target=_narrow(microbatch.target, samples, start, size),
        samples=size,
        part=part,
    )


def share_sizes(samples: int, parts: int) -> list[int]:
    """How many of `samples` each of `parts` gets; the first ones take the remainder."""
    return [samples // parts + (index < samples % parts) for index in range(parts)]


def chunks(form: ModelInputs, inputs: Any) -> int:
    """How many microbatches of at most the captured size a batch of any size makes."""
    samples = _samples(form, form.bind(*arguments(inputs)))
    return max(1, -(-samples // form.microbatch_size))


def join(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The outputs of consecutive microbatches as the output for all of them.

    A tensor whose dimension 0 counts samples is concatenated, another one is stacked, and what is no tensor is taken
    from the first microbatch.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [pytree.tree_flatten(output) for output in outputs]
    leaves = [_join_leaf(column, sizes) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _join_leaf(column: tuple[Any, ...], sizes: Sequence[int]) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    if all(leaf.ndim > 0 and leaf.shape[0] == size for leaf, size in zip(column, sizes, strict=True)):
        return torch.cat(column)
    return torch.stack(column)


def _samples(form: ModelInputs, tensors: Mapping[str, Tensor]) -> int:
    counts = {name: tensors[name].shape[0] if tensors[name].ndim else 0 for name in tensors if name in form.batched}
    if not counts:
        raise PenstockError(
            "no input has a batch dimension: nothing in sample= has as its dimension 0 the number of samples. Pass "
            "inputs whose first dimension counts samples"
        )
    if len(set(counts.values())) > 1:
        raise PenstockError(
            f"the inputs disagree on the number of samples (dimension 0): {counts}. Pass inputs of one batch size"
        )
    return next(iter(counts.values()))


def _check_target(target: Any, samples: int) -> None:
    leaves = [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor)]
    if leaves and not any(_is_batched(leaf, samples) for leaf in leaves):
        raise PenstockError(
            f"the target has dimension 0 of {[leaf.shape[0] if leaf.ndim else None for leaf in leaves]} and the inputs "
            f"hold {samples} samples: pass one target for every sample"
        )


def _narrow(target: Any, samples: int, start: int, size: int) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.narrow(0, start, size) if isinstance(leaf, Tensor) and _is_batched(leaf, samples) else leaf,
        target,
    )


def _is_batched(leaf: Tensor, samples: int) -> bool:
    return leaf.ndim > 0 and leaf.shape[0] == samples
