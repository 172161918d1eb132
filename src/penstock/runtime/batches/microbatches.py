"""A minibatch cut into microbatches.

Every rank cuts its own copy of the batch in the same way, so a microbatch needs no message: only what the model
computes travels. Where the batch does not divide evenly the first microbatches take one sample more, and each
microbatch weighs as many samples as it has (or tokens, if the user says so), so that the loss and its gradient stay
means over samples.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from penstock.capturing.model_forms import ModelInputs
from penstock.capturing.samples import check_leaves, flatten
from penstock.errors import PenstockError
from penstock.torch_internals import pytrees as pytree
from penstock.training.losses import LossWeight, amount_of, check_amounts

__all__ = ["Microbatch", "chunks", "join", "share_spans", "split", "take_part"]


# Not frozen: a frozen one takes three times as long to make, and every step makes m of them.
@dataclass(slots=True, eq=False)
class Microbatch:
    """The part of a minibatch that goes through the pipeline as one. Nobody changes it."""

    inputs: Mapping[str, Tensor]
    """The model's input tensors by value name."""
    target: Any
    samples: int
    amount: float
    """What its loss is the mean over: its samples, or what the user counts of its target."""
    total: float
    """That of the minibatch."""
    signature: Hashable
    """The shapes and types of the inputs of the whole microbatch: what decides the shapes of everything that the stages
    exchange.
    """
    whole: int
    """The samples of the whole microbatch, of which this is a part where replicas split it."""
    whole_amount: float
    """What the loss of the whole microbatch is the mean over."""
    weigh: LossWeight | None = None
    part: int = 0

    @property
    def weight(self) -> float:
        """Its share of the minibatch."""
        return self.amount / self.total

    @property
    def share(self) -> float:
        """Its share of the whole microbatch."""
        return self.amount / self.whole_amount if self.whole_amount else 0.0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of the inputs and the target that is a tensor."""
        leaves = [*self.inputs.values(), *pytree.tree_leaves(self.target)]
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def split(
    form: ModelInputs, inputs: Any, target: Any, count: int, parts: int = 1, weigh: LossWeight | None = None
) -> tuple[Microbatch, ...]:
    """`inputs` and `target` as `count` microbatches, which replicas will cut into at most `parts` parts each. `weigh`:
    what the loss for a target is the mean over, if it is not its samples.

    Tensors whose dimension 0 counts the samples are cut along it (views, no copies); everything else goes whole to
    every microbatch. `PenstockError` if the sizes disagree or there are fewer samples than microbatches or parts.
    """
    tensors = form.read(inputs)
    samples = _samples(form, tensors)
    if samples < count:
        raise PenstockError(
            f"a minibatch of {samples} sample(s) cannot be cut into {count} microbatches: pass at least {count} "
            "samples (drop_last=True of a DataLoader leaves out a smaller last batch), or build the Pipeline with "
            f"microbatches={max(samples, 1)} or fewer"
        )
    if samples // count < parts:
        raise PenstockError(
            f"a minibatch of {samples} sample(s) makes microbatches of {samples // count}, which {parts} replicas of a "
            f"stage cannot split: pass at least {count * parts} samples, or plan with fewer microbatches or replicas"
        )
    spans = share_spans(samples, count)
    sizes = [len(span) for span in spans]
    for part in {len(share) for size in set(sizes) for share in share_spans(size, parts)}:
        form.check_samples(part)
    _check_target(target, samples)
    targets = _split_target(target, samples, spans)
    amounts = [amount_of(weigh, piece, size) for piece, size in zip(targets, sizes, strict=True)]
    check_amounts(amounts)
    total = sum(amounts)
    names = tuple(tensors)
    columns = [_split_rows(t, spans) if name in form.batched else [t] * count for name, t in tensors.items()]
    signatures: dict[int, Hashable] = {}
    made = []
    for size, amount, piece, *cut in zip(sizes, amounts, targets, *columns, strict=True):
        signature = signatures.get(size)
        if signature is None:
            described = ((name, tuple(tensor.shape), tensor.dtype) for name, tensor in zip(names, cut, strict=True))
            signature = signatures[size] = tuple(described)
        own = dict(zip(names, cut, strict=True))
        made.append(Microbatch(own, piece, size, amount, total, signature, size, amount, weigh))
    return tuple(made)


def take_part(form: ModelInputs, microbatch: Microbatch, part: int, parts: int) -> Microbatch:
    """Part `part` of the `parts` that the replicas of a stage make of `microbatch`."""
    if parts == 1:
        return microbatch
    samples = microbatch.samples
    span = share_spans(samples, parts)[part]
    target = _narrow(microbatch.target, samples, span)
    return replace(
        microbatch,
        inputs=_cut(form, microbatch.inputs, span),
        target=target,
        samples=len(span),
        amount=amount_of(microbatch.weigh, target, len(span)),
        part=part,
    )


@lru_cache(maxsize=1 << 10)
def share_spans(samples: int, parts: int) -> tuple[range, ...]:
    """Which of `samples` each of `parts` gets; the first ones take the remainder."""
    ends = accumulate((samples // parts + (index < samples % parts) for index in range(parts)), initial=0)
    return tuple(range(start, stop) for start, stop in pairwise(ends))


def chunks(form: ModelInputs, inputs: Any) -> int:
    """How many microbatches of at most the captured size a batch of any size makes."""
    samples = _samples(form, form.read(inputs))
    return max(1, -(-samples // form.microbatch_size))


def join(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The outputs of consecutive microbatches as the output for all of them.

    A tensor whose dimension 0 counts samples is concatenated, another one is stacked, and what is no tensor is taken
    from the first microbatch. `PenstockError` where microbatches of different sizes make stacking impossible.
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
    if len({leaf.shape for leaf in column}) > 1:
        raise PenstockError(
            f"the model returns a tensor without the samples as its dimension 0: {tuple(column[0].shape)} for "
            f"{sizes[0]} samples and {tuple(column[-1].shape)} for {sizes[-1]}, which make no whole. Predict batches "
            f"that divide into microbatches of {sizes[0]}, or return it with the samples first"
        )
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
            f"the inputs disagree on the number of samples (dimension 0): {counts}. Pass inputs of one batch size. "
            f"These tensors are taken to count samples because each had dimension 0 of {form.microbatch_size} in "
            "sample=: if one does not, give sample= another number of samples"
        )
    samples = next(iter(counts.values()))
    if samples == 0:
        raise PenstockError("the batch is empty (dimension 0 of its tensors is 0): pass at least one sample")
    return samples


def _check_target(target: Any, samples: int) -> None:
    if isinstance(target, Tensor) and _is_batched(target, samples):
        return
    leaves, _ = flatten(target)
    check_leaves(("the target, or a part of it,", leaf) for leaf in leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if tensors and not any(_is_batched(leaf, samples) for leaf in tensors):
        raise PenstockError(
            f"the target has dimension 0 of {[leaf.shape[0] if leaf.ndim else None for leaf in tensors]} and the "
            f"inputs hold {samples} samples: pass one target for every sample"
        )


def _cut(form: ModelInputs, tensors: Mapping[str, Tensor], span: range) -> dict[str, Tensor]:
    return {
        name: tensor.narrow(0, span.start, len(span)) if name in form.batched else tensor
        for name, tensor in tensors.items()
    }


def _split_rows(tensor: Tensor, spans: Sequence[range]) -> Sequence[Tensor]:
    """`tensor` in views of its rows in each of `spans`, which follow each other."""
    if not tensor.requires_grad:
        return tensor.split_with_sizes([len(span) for span in spans])
    # A view that autograd knows of as one of several must not be written to.
    return [tensor.narrow(0, span.start, len(span)) for span in spans]


def _split_target(target: Any, samples: int, spans: Sequence[range]) -> Sequence[Any]:
    """`target` in a part for the samples of each of `spans`."""
    if isinstance(target, Tensor) and _is_batched(target, samples):
        return _split_rows(target, spans)
    return [_narrow(target, samples, span) for span in spans]


def _narrow(target: Any, samples: int, span: range) -> Any:
    leaves, structure = flatten(target)
    return pytree.tree_unflatten(
        [
            leaf.narrow(0, span.start, len(span)) if isinstance(leaf, Tensor) and _is_batched(leaf, samples) else leaf
            for leaf in leaves
        ],
        structure,
    )


def _is_batched(leaf: Tensor, samples: int) -> bool:
    return leaf.ndim > 0 and leaf.shape[0] == samples
