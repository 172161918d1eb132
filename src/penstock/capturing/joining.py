"""Joining layers that no cut may separate.

A cut sends each value as a tensor of its own, to a process with modules of its own. That changes what the model
computes in two cases: a tensor and a view of it cross together and one of them is written in place later; or two layers
hold what one of them changes, such as one BatchNorm that is called twice, a module that counts its calls, or a frozen
weight that a layer moves. There the layers on both sides become one.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from torch import Tensor, nn

from penstock.capturing.chain import Layer, LayerChain, follow_memory
from penstock.capturing.observation import Observation, memory_of
from penstock.capturing.shared_writes import writes_arguments
from penstock.errors import CaptureError


class JoinedLayers(nn.Module):
    """Consecutive layers as one; writes in place reach the values that they were given."""

    def __init__(self, layers: Sequence[Layer], inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.module for layer in layers)
        self.reads = tuple(layer.inputs for layer in layers)
        self.writes = tuple(layer.outputs for layer in layers)
        self.inputs = inputs
        self.outputs = outputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self.inputs, tensors, strict=True))
        for layer, reads, writes in zip(self.layers, self.reads, self.writes, strict=True):
            values.update(zip(writes, layer(*(values[name] for name in reads)), strict=True))
        return tuple(values[name] for name in self.outputs)


def join_layers(
    layers: Sequence[Layer],
    returned: tuple[str, ...],
    observations: Sequence[Observation],
    trained: Sequence[Layer] | None = None,
) -> tuple[Layer, ...]:
    """`layers` with those joined that a cut would separate wrongly; `returned` is what the model returns.
    `trained`: the layers of the training, in evaluation, which may write less: a cut may fall before these only.
    """
    needed = _needed(layers, returned)
    shared = _cuts_through_state(layers, observations)
    forbidden = _cuts_through_views(layers, needed, observations) | shared.keys()
    if trained is not None:
        starts = {layer.name for layer in trained}
        forbidden |= {index for index, layer in enumerate(layers) if layer.name not in starts}
    joined: list[Layer] = []
    start = 0
    for stop in range(1, len(layers) + 1):
        if stop not in forbidden:
            shares = dict.fromkeys(text for cut in range(start + 1, stop) if (text := shared.get(cut)))
            joined.append(_join(layers[start:stop], needed[stop], tuple(shares)))
            start = stop
    return tuple(joined)


def with_evaluation(chain: LayerChain, model: nn.Module, name: str, capture: Callable[[], LayerChain]) -> LayerChain:
    """`chain`, whose `evaluation` is what `capture` makes of copies of `model` in evaluation mode, when first called.

    That raises `CaptureError` if it does not have the same layers: a plan names them by position.
    """

    @cache
    def evaluation() -> LayerChain:
        evaluated = capture()
        own, others = ([layer.name for layer in each.layers] for each in (chain, evaluated))
        if own == others:
            # Everything between the blocks is in evaluation mode then.
            chain.reads.extend(evaluated.reads.without("training"))
            return replace(evaluated, evaluation=lambda: evaluation())
        different = next(iter(sorted(set(own) ^ set(others))), own[0])
        raise CaptureError(
            f"{name} has other layers in evaluation mode than in training mode ({different} is in one of them only): "
            "expected the same blocks, in the same order. Pass it as a list of layers that run in both modes"
        )

    if any(inner.training for inner in model.modules()):
        return replace(chain, evaluation=evaluation)
    alone = replace(chain, evaluation=lambda: alone)
    return alone


def _needed(layers: Sequence[Layer], returned: tuple[str, ...]) -> list[frozenset[str]]:
    """The values that are read after each cut."""
    needed = [frozenset(returned)]
    for layer in reversed(layers):
        needed.append(needed[-1] | set(layer.inputs))
    return needed[::-1]


def _cuts_through_views(
    layers: Sequence[Layer], needed: Sequence[frozenset[str]], observations: Sequence[Observation]
) -> set[int]:
    """The cuts which two values with the same memory cross, of which a later layer writes one, or may by its code."""
    storage: dict[str, int] = {}
    for layer, observation in zip(layers, observations, strict=True):
        storage.update(zip(layer.outputs, map(memory_of, observation.results), strict=True))
    forbidden = set()
    for cut in range(1, len(layers)):
        written = {
            memory_of(observation.arguments[position])
            for observation in observations[cut:]
            for position in observation.mutated
        }
        crossing = {name for layer in layers[:cut] for name in layer.outputs} & needed[cut]
        together = {memory for memory, count in Counter(storage[name] for name in crossing).items() if count > 1}
        readers = (each for each in observations[cut:] if not together.isdisjoint(map(memory_of, each.arguments)))
        if together & written or (together and any(writes_arguments(each.bodies) for each in readers)):
            forbidden.add(cut)
    return forbidden


def _cuts_through_state(layers: Sequence[Layer], observations: Sequence[Observation]) -> dict[int, str]:
    """The cuts between two layers that hold the same buffer, frozen parameter, module or object of Python, if one of
    them changes it or has code that can: with that object, if code was found.
    """
    changed = {id(each) for seen in observations for each in seen.mutated_buffers}
    first: dict[int, int] = {}
    forbidden: dict[int, str] = {}
    for index, (layer, seen) in enumerate(zip(layers, observations, strict=True)):
        tensors = map(id, (*layer.module.buffers(), *layer.module.parameters()))
        for key in changed.intersection(tensors).union(seen.shared):
            cuts = range(first.setdefault(key, index) + 1, index + 1)
            forbidden.update(dict.fromkeys(cuts, seen.shared.get(key, "")))
    return forbidden


def _join(layers: Sequence[Layer], needed: frozenset[str], shares: tuple[str, ...]) -> Layer:
    if len(layers) == 1:
        return layers[0]
    written = dict.fromkeys(name for layer in layers for name in layer.outputs)
    inputs = tuple(dict.fromkeys(name for layer in layers for name in layer.inputs if name not in written))
    outputs = tuple(name for name in written if name in needed)
    roots, mutated = follow_memory(layers)
    kinds = {name: kind for layer in layers for name, kind in zip(layer.outputs, layer.output_kinds, strict=True)}
    return Layer(
        name=layers[0].name,
        module=JoinedLayers(layers, inputs, outputs),
        inputs=inputs,
        outputs=outputs,
        random=any(layer.random for layer in layers),
        mutates=tuple(name for name in inputs if name in mutated),
        output_kinds=tuple(kinds[name] for name in outputs),
        operators=tuple(operator for layer in layers for operator in layer.operators),
        volatile=tuple(name for layer in layers for name in layer.volatile if name in outputs),
        views=tuple((name, roots[name]) for name in outputs if roots.get(name) in inputs),
        shares=shares,
    )
