"""Whether a trace holds for sizes of one.

Export takes it for granted that a free size is at least two, and drops what the model's code would do for a single
sample, or a sequence of a single token: ``if length == 1``, or a `squeeze`. Most models do nothing of that kind, and
a prediction is often of one sample. So the chain is tried with each free size at one.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from penstock.capturing.chain import LayerChain
from penstock.capturing.chain_checks import ChainCheck
from penstock.capturing.checking import agrees
from penstock.capturing.model_forms import ModelInputs
from penstock.capturing.sampled_models import SampledModel
from penstock.capturing.samples import Call, flatten
from penstock.torch_internals import pytrees as pytree

Place = tuple[str, int]
"""A tensor and one of its dimensions."""


def checks_for_one(sampled: SampledModel, chain: LayerChain) -> list[ChainCheck]:
    """That `chain` computes what the model does for each free size at one; else its least size is two.

    The first sample, or the first steps, of the sample are tried.
    """
    inputs, call = chain.inputs, sampled.call
    return [
        ChainCheck(partial(_agrees_for_one, sampled, chain, group), partial(_at_least_two, group))
        for group in _free_groups(inputs, _shapes(inputs, call))
    ]


def _agrees_for_one(sampled: SampledModel, chain: LayerChain, group: frozenset[Place]) -> bool:
    return agrees(sampled, chain, _narrowed(chain.inputs, sampled.call, group))


def _at_least_two(group: frozenset[Place], inputs: ModelInputs) -> ModelInputs:
    sizes = {name: list(bounds) for name, bounds in inputs.sizes.items()}
    for name, index in group:
        sizes[name][index] = (2, sizes[name][index][1])
    return replace(inputs, sizes={name: tuple(bounds) for name, bounds in sizes.items()})


def _free_groups(inputs: ModelInputs, shapes: Mapping[str, tuple[int, ...]]) -> list[frozenset[Place]]:
    """The dimensions that may have size one, those together that may only have it together.

    These are the numbers of samples, and the others by their size in the sample: a mask is as long as the sequence, and
    a mask of one for a sequence of many is nothing that a user passes.
    """
    groups: defaultdict[int, set[Place]] = defaultdict(set)
    for name, shape in shapes.items():
        for index, size in enumerate(shape):
            groups[0 if name in inputs.batched and index == 0 else size].add((name, index))

    def is_free(place: Place) -> bool:
        name, index = place
        return inputs.sizes[name][index][0] <= 1 and shapes[name][index] > 1

    free = (frozenset(filter(is_free, group)) for group in groups.values())
    return [group for group in free if group]


def _shapes(inputs: ModelInputs, call: Call) -> dict[str, tuple[int, ...]]:
    leaves, _ = flatten((call.args, call.kwargs))
    pairs = zip(inputs.names, leaves, strict=True)
    return {name: tuple(leaf.shape) for name, leaf in pairs if isinstance(leaf, Tensor)}


def _narrowed(inputs: ModelInputs, call: Call, places: Iterable[Place]) -> Call:
    """`call` with the first entry only of the dimensions `places`."""
    leaves, structure = flatten((call.args, call.kwargs))
    named = dict(zip(inputs.names, leaves, strict=True))
    for name, index in places:
        named[name] = named[name].narrow(index, 0, 1)
    args, kwargs = pytree.tree_unflatten(list(named.values()), structure)
    return Call(args, kwargs)
