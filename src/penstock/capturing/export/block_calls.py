"""How a model calls its blocks: seen by running it on the sample, and on samples of other sizes.

Nothing here is traced. What one call looks like in runs of several sizes says which sizes of its results follow from
those of its arguments.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from penstock.capturing.export.model_runs import ModelRun
from penstock.capturing.export.watched_runs import ModuleCall, ModuleCalls, ResultShape, Watch
from penstock.capturing.sampled_models import SampledModel
from penstock.capturing.samples import Call, flatten
from penstock.errors import CaptureError
from penstock.torch_internals.export import replaced_attribute
from penstock.torch_internals.pytrees import TreeSpec, tree_unflatten

Dimension: TypeAlias = tuple[str, int]
"""An input and the index of one of its dimensions."""
Sizes: TypeAlias = tuple[int, ...]
"""One size in each of the runs."""


@dataclass(frozen=True, slots=True, eq=False)
class ResultTensor:
    """One tensor that a call of a module returns."""

    sizes: tuple[Sizes, ...]
    """For every dimension."""
    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...]
    """The dimensions by their stride, the largest first."""


@dataclass(slots=True, eq=False)
class BlockCall:
    """One call of a module."""

    arguments: tuple[tuple[Sizes, ...], ...]
    """For every tensor among the arguments, its dimensions."""
    numbers: tuple[Sizes, ...]
    """The whole numbers among the arguments."""
    structure: TreeSpec
    """Of what it returns."""
    leaves: tuple[Any, ...]
    """Of what it returns: a `ResultTensor`, the `Sizes` of a whole number, or a constant."""
    objects: tuple[Any, ...]
    """For every leaf of the arguments: the class `Tensor` for a tensor, else the object in the first run."""
    lasting: tuple[bool, ...]
    """For every leaf of the arguments: whether it is the same object, or a tensor, in every run."""
    by_forward: bool
    """Whether it is ``block.forward(x)``, which runs no hooks, and not ``block(x)``."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCalls:
    """The calls of blocks, and what sizes of inputs the model takes."""

    calls: Mapping[str, list[BlockCall]]
    """By path of the module, in the order of the run."""
    fixed: frozenset[Dimension]
    """Dimensions of inputs that may only have the size of the sample."""
    together: tuple[tuple[Dimension, ...], ...]
    """Groups of dimensions of several inputs that had one size in every run; see `may_differ`."""


def record_calls(
    sampled: SampledModel,
    paths: Collection[str],
    run: ModelRun,
    free: Literal["sizes", "samples", "nothing"] = "sizes",
    opening: str | None = None,
) -> RecordedCalls:
    """The calls of the modules `paths` in `run`, and in runs with other sizes of each dimension of the sample.

    `free`: with ``"samples"`` only their number is changed, and all other dimensions are fixed.
    `opening`: the block that the opening of the model ends with; its call is noted for the path of the model itself.
    """
    by_forward = {path for path, calls in run.calls[0].items() if any(call.by_forward for call in calls)}
    watch = partial(_record, sampled, paths=paths, by_forward=by_forward, opening=opening)
    noted = run.calls if opening is None else [watch(sampled.call.copied()) for _ in range(2)]
    first, again = ({path: calls[path] for path in paths} for calls in noted)
    _check_repeatable(first, again)
    runs, fixed, together = [first, again], set[Dimension](), []
    groups = list(size_groups(sampled, least=3))
    samples = groups[0]
    tried = {"samples": 1, "nothing": 0}.get(free, len(groups))
    fixed.update(*groups[tried:])
    groups = groups[:tried]
    while groups:
        group = groups.pop(0)
        found = _record_resized(sampled, group, watch, first, _LENGTHS if opening is None else (*_LENGTHS, grow))
        # Dimensions may have one size by chance.
        if found is None and len(apart := {index for _, index in group}) > 1:
            groups.extend(frozenset(each for each in group if each[1] == index) for index in sorted(apart))
            continue
        if found is None:
            fixed.update(group)
        else:
            runs.append(found)
            # That numbers of samples are equal is checked as such.
            names = {name for name, _ in group}
            if len(names) > 1 and group != samples:
                together.append(tuple(sorted(group)))
    return RecordedCalls(
        {path: _merged([run[path] for run in runs]) for path in paths}, frozenset(fixed), tuple(together)
    )


def _check_repeatable(first: ModuleCalls, again: ModuleCalls) -> None:
    for path, calls in first.items():
        if not _alike({path: calls}, {path: again[path]}):
            raise CaptureError(
                f"block {path} was called {len(calls)} times in one run on the sample and {len(again[path])} times, or "
                "with or for other things, in the next one: expected the same calls in every run. If the model skips "
                "blocks at random (layerdrop), set this probability to 0, or skip inside of the block; or pass the "
                "model as a list of layers"
            )


def size_groups(sampled: SampledModel, least: int) -> Iterator[frozenset[Dimension]]:
    """Dimensions of inputs that change together: the samples, and those of one size, at `least`, in the sample."""
    batched = sampled.inputs.batched
    yield frozenset((name, 0) for name in batched)
    groups: dict[int, set[Dimension]] = defaultdict(set)
    for name, leaf in sampled.inputs.bind(sampled.call.args, sampled.call.kwargs).items():
        for index, size in enumerate(leaf.shape):
            if size >= least and not (index == 0 and name in batched):
                groups[size].add((name, index))
    yield from map(frozenset, groups.values())


def _record(
    sampled: SampledModel,
    call: Call,
    paths: Collection[str] = (),
    by_forward: Collection[str] = (),
    opening: str | None = None,
) -> ModuleCalls:
    # Dynamo, which runs torch.cond, logs errors for sizes that the model does not take.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with replaced_attribute(logger, "disabled", True), sampled.copied() as copies, torch.no_grad():
        watch = Watch(sampled.model, copies, paths, by_forward=by_forward, first=opening)
        watch.run(call)
        return watch.calls


def _record_resized(
    sampled: SampledModel,
    group: frozenset[Dimension],
    watch: Callable[[Call], ModuleCalls],
    expected: Mapping[str, Sequence[ModuleCall]],
    ways: Sequence[Callable[[Tensor, int], Tensor]],
) -> ModuleCalls | None:
    """The calls with other sizes of the dimensions in `group`; None if the model does not take them. `watch`: runs the
    model. `ways`: to resize dimensions that are no samples.
    """
    samples = any(name in sampled.inputs.batched and index == 0 for name, index in group)
    for resize in (grow,) if samples else ways:
        try:
            found = watch(resized(sampled, group, resize))
        except Exception:
            continue
        if _alike(expected, found):
            return found
    return None


def may_differ(sampled: SampledModel, group: Collection[Dimension]) -> bool:
    """Whether the model takes other sizes of the dimensions of one input in `group` alone."""
    # In one order in all processes: the model may wait for other ones.
    for own in sorted({name for name, _ in group}):
        try:
            _record(sampled, resized(sampled, [each for each in group if each[0] == own], shrink))
        except Exception:
            continue
        return True
    return False


def resized(sampled: SampledModel, group: Iterable[Dimension], resize: Callable[[Tensor, int], Tensor]) -> Call:
    """The sample with other sizes of the dimensions in `group`."""
    leaves, structure = flatten((sampled.call.args, sampled.call.kwargs))
    named = dict(zip(sampled.inputs.names, leaves, strict=True))
    for name, index in group:
        named[name] = resize(named[name], index)
    args, kwargs = tree_unflatten(list(named.values()), structure)
    return Call(args, kwargs).copied()


def grow(tensor: Tensor, index: int) -> Tensor:
    return torch.cat([tensor, tensor.narrow(index, 0, 1)], index)


def shrink(tensor: Tensor, index: int) -> Tensor:
    return tensor.narrow(index, 0, max(tensor.shape[index] - 1, 1))


def _halve(tensor: Tensor, index: int) -> Tensor:
    return tensor.narrow(index, 0, max(tensor.shape[index] // 2, 1))


_LENGTHS = (shrink, _halve)


def _alike(expected: Mapping[str, Sequence[ModuleCall]], found: Mapping[str, Sequence[ModuleCall]]) -> bool:
    """Whether the same modules were called with and returned the same but for sizes."""
    one, other = ({path: list(map(_kind, calls)) for path, calls in run.items()} for run in (expected, found))
    return one == other


def _kind(call: ModuleCall) -> tuple[Any, ...]:
    """What two calls that differ in sizes only have in common."""
    tensors = [(len(leaf.size), leaf.dtype) if isinstance(leaf, ResultShape) else None for leaf in call.leaves]
    return call.structure, len(call.objects), call.by_forward, [len(shape) for shape in call.arguments], tensors


def _merged(runs: Sequence[Sequence[ModuleCall]]) -> list[BlockCall]:
    """The calls of one module in all runs."""
    merged = []
    for calls in zip(*runs, strict=True):
        first: ModuleCall = calls[0]
        assert first.structure is not None
        leaves: list[Any] = []
        for index, leaf in enumerate(first.leaves):
            others = [call.leaves[index] for call in calls]
            if isinstance(leaf, ResultShape):
                sizes = tuple(zip(*(other.size for other in others), strict=True))
                strides = leaf.stride or tuple(range(len(sizes), 0, -1))
                order = sorted(range(len(sizes)), key=strides.__getitem__, reverse=True)
                leaves.append(ResultTensor(sizes, leaf.dtype, leaf.device, tuple(order)))
            else:
                leaves.append(tuple(others) if type(leaf) is int else leaf)
        merged.append(
            BlockCall(
                arguments=tuple(
                    tuple(zip(*shapes, strict=True)) for shapes in zip(*(call.arguments for call in calls), strict=True)
                ),
                numbers=tuple(zip(*(call.numbers for call in calls), strict=True)),
                structure=first.structure,
                leaves=tuple(leaves),
                objects=tuple(first.objects),
                lasting=tuple(
                    all(other is each[0] for other in each) for each in zip(*(c.objects for c in calls), strict=True)
                ),
                by_forward=first.by_forward,
            )
        )
    return merged
