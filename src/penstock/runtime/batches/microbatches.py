"""Cuts minibatches into microbatches.

Every rank cuts its own copy of the batch in the same way, so a microbatch needs no message: only what the model
computes is sent. Where the batch does not divide evenly, the first microbatches have one sample more. Each microbatch
weighs as many samples as it has (or tokens, if the user counts those), so that the loss and its gradient stay means
over samples.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from penstock.capturing.model_forms import ModelInputs
from penstock.capturing.samples import check_dense, check_leaves, flatten
from penstock.errors import PenstockError
from penstock.torch_internals import pytrees as pytree
from penstock.training.losses import Weigh


# Not frozen: a frozen one takes three times as long to make, and every step makes m of them.
@dataclass(slots=True, eq=False)
class Microbatch:
    """Holds the samples of a minibatch that go through the pipeline together, or the slice of them that a replica
    takes.

    It is not changed after it is made.
    """

    inputs: Mapping[str, Tensor]
    """The model's input tensors by value name."""
    target: Any
    samples: int
    amount: float
    """The size that its loss is a mean over: its samples, or the user's count for its target."""
    total: float
    """The amount of the whole minibatch."""
    signature: Hashable
    """The shapes and types of the inputs of the whole microbatch, which determine the shapes of all messages between
    stages.
    """
    microbatch_samples: int
    """The samples of the whole microbatch, of which this is a slice where replicas split it."""
    microbatch_amount: float
    """The amount of the whole microbatch."""
    target_form: "TargetForm"
    weigh: Weigh | None = None
    slice_index: int = 0

    @property
    def weight(self) -> float:
        """Its share of the minibatch."""
        return self.amount / self.total

    @property
    def microbatch_share(self) -> float:
        """Its share of the whole microbatch."""
        return self.amount / self.microbatch_amount if self.microbatch_amount else 0.0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors among the inputs and the target."""
        # Every step asks; looking through a tree takes longer than the rest.
        if isinstance(self.target, Tensor):
            return (*self.inputs.values(), self.target)
        return (*self.inputs.values(), *[leaf for leaf in pytree.tree_leaves(self.target) if isinstance(leaf, Tensor)])


def split(spec: ModelInputs, inputs: Any, target: Any, count: int, slices: int = 1) -> tuple[Microbatch, ...]:
    """Cuts `inputs` and `target` into `count` microbatches, which replicas will cut into at most `slices` slices each.
    Each weighs its number of samples.

    Tensors whose dimension 0 counts the samples are cut along it (views, no copies), and so are lists of one entry per
    sample in the target; everything else goes whole to every microbatch. Raises `PenstockError` if the sizes disagree
    or there are too few samples.
    """
    tensors = spec.read(inputs)
    samples = _samples(spec, tensors)
    if samples < count:
        raise PenstockError(
            f"a minibatch of {samples} sample(s) cannot be cut into {count} microbatches: pass at least {count} "
            "samples (drop_last=True of a DataLoader leaves out a smaller last batch), or build the Pipeline with "
            f"microbatches={max(samples, 1)} or fewer"
        )
    if samples // count < slices:
        raise PenstockError(
            f"a minibatch of {samples} sample(s) makes microbatches of {samples // count}, which {slices} replicas of "
            f"a stage cannot split: pass at least {count * slices} samples, or plan with fewer microbatches or replicas"
        )
    spans = even_spans(samples, count)
    sizes = list(map(len, spans))
    for whole in set(sizes):
        for size in set(map(len, even_spans(whole, slices))):
            spec.check_samples(size, tensors)
    if spec.whole_rows and count * slices > 1:
        spec.check_whole(samples, tensors)
    form = read_target(target, samples, is_cut=count * slices > 1)
    targets = form.pieces(target, spans)
    names, columns = tuple(tensors), list[Sequence[Tensor]]()
    for name, tensor in tensors.items():
        columns.append(rows_of(tensor, spans) if name in spec.batched else [tensor] * count)
    signatures: dict[int, Hashable] = {}
    made = []
    for size, target_piece, *cut in zip(sizes, targets, *columns, strict=True):
        signature = signatures.get(size)
        if signature is None:
            described = []
            for name, piece in zip(names, cut, strict=True):
                described.append((name, tuple(piece.shape), piece.dtype))
            signature = signatures[size] = tuple(described)
        own = dict(zip(names, cut, strict=True))
        made.append(Microbatch(own, target_piece, size, size, samples, signature, size, size, form))
    return tuple(made)


def weighed(microbatches: Sequence[Microbatch], weigh: Weigh | None) -> tuple[Microbatch, ...]:
    """Makes one minibatch of `microbatches`, which may be cut from several, that weigh what `weigh` says."""
    amounts: Sequence[float] = [microbatch.samples for microbatch in microbatches]
    if weigh is not None:
        amounts = weigh([microbatch.target for microbatch in microbatches], amounts)
    total = sum(amounts)
    return tuple(
        replace(microbatch, amount=amount, total=total, microbatch_amount=amount, weigh=weigh)
        for microbatch, amount in zip(microbatches, amounts, strict=True)
    )


def take_slice(spec: ModelInputs, microbatch: Microbatch, index: int, slices: int) -> Microbatch:
    """Slice `index` of the `slices` that the replicas of a stage cut `microbatch` into."""
    if slices == 1:
        return microbatch
    samples = microbatch.samples
    span = even_spans(samples, slices)[index]
    (target,) = microbatch.target_form.pieces(microbatch.target, [span])
    return replace(
        microbatch,
        inputs=_cut(spec, microbatch.inputs, span),
        target=target,
        samples=len(span),
        amount=len(span) if microbatch.weigh is None else microbatch.weigh([target], [len(span)])[0],
        slice_index=index,
    )


@lru_cache(maxsize=1 << 10)
def even_spans(samples: int, count: int) -> tuple[range, ...]:
    """Cuts `samples` into `count` spans of equal length; the first ones are longer by one if there is a remainder."""
    ends = accumulate((samples // count + (index < samples % count) for index in range(count)), initial=0)
    return tuple(range(start, stop) for start, stop in pairwise(ends))


def count_microbatches(spec: ModelInputs, inputs: Any, largest: int) -> int:
    """The number of microbatches of at most `largest` samples in a batch of any size."""
    samples = _samples(spec, spec.read(inputs))
    return max(1, -(-samples // largest))


def join(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Joins the outputs of consecutive microbatches into one output.

    Tensors whose dimension 0 counts samples are concatenated, other tensors are stacked, and anything else is taken
    from the first microbatch. Raises `PenstockError` where tensors to stack have different shapes.
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
            f"{sizes[0]} samples and {tuple(column[-1].shape)} for {sizes[-1]}, which cannot be stacked. Predict "
            f"batches that divide into microbatches of {sizes[0]}, or return it with the samples first"
        )
    return torch.stack(column)


def _samples(spec: ModelInputs, tensors: Mapping[str, Tensor]) -> int:
    counts = {}
    for name, tensor in tensors.items():
        if name in spec.batched:
            check_dense(name, tensor)
            counts[name] = tensor.shape[0] if tensor.ndim else 0
    if not counts:
        raise PenstockError(
            "no input has a batch dimension: nothing in sample= has as its dimension 0 the number of samples. Pass "
            "inputs whose first dimension counts samples"
        )
    samples = next(iter(counts.values()))
    if len(set(counts.values())) > 1:
        raise PenstockError(
            f"the inputs disagree on the number of samples (dimension 0): {counts}. Pass inputs of one batch size. "
            f"These tensors are taken to count samples because each had dimension 0 of {spec.microbatch_size} in "
            "sample=: if one does not, give sample= another number of samples"
        )
    if samples == 0:
        raise PenstockError("the batch is empty (dimension 0 of its tensors is 0): pass at least one sample")
    return samples


def _cut(spec: ModelInputs, tensors: Mapping[str, Tensor], span: range) -> dict[str, Tensor]:
    return {
        name: tensor.narrow(0, span.start, len(span)) if name in spec.batched else tensor
        for name, tensor in tensors.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class TargetForm:
    """The structure of a target, in which a list of one entry per sample is a leaf, and which leaves are cut.

    These are tensors with as many entries in dimension 0 as the batch has samples, and lists and tuples of as many
    entries. Where a list of that length holds tensors of that length, its entries are parts of the target, and are cut
    themselves.
    """

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
        return tensor.split_with_sizes(list(map(len, spans)))
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
