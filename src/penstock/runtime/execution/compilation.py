"""Compiles stages with `torch.compile`: one graph for all versions of a stage's weights, under every schedule.

A stage is compiled in *regions*: each random layer is a region of its own, since it starts a random stream of its own
outside of the compiled code, and the layers between two of them are one region. A stage without random layers is one
region. Where backwards are split, and where every layer recomputes by itself, every layer is a region. A compiled layer
computes all its gradients in the input backward, and the weight backward adds those of weights.

A region is a generated function that calls its layers. The layers are an argument of it, so the copies of a stage for
several versions and replicas, which share their generated code, run the one graph that the first of them compiled.

Laws of this file:
  1. A layer that writes in place writes in a copy, which the region returns: no graph writes its arguments. The model's
     buffers are the exception.
  2. Random generators are set and restored outside of the compiled code.
  3. So are the modes of modules: compiled code that a `torch.no_grad` interrupts has been seen to lose a mode that it
     had set.
  4. The evaluation, which is another capture of the same layers, has graphs of its own.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import set_checkpoint_early_stop

from penstock.arguments import text_of
from penstock.capturing.chain import Layer, LayerChain, LayerRunner, StageModule
from penstock.capturing.randomness import seeded
from penstock.errors import PlanError

_GRAPHED_MODES = ("reduce-overhead", "max-autotune")
_GRAPHS = "triton.cudagraphs"


def read_compilation(option: bool | Mapping[str, Any], parallelized: bool = False) -> Mapping[str, Any] | None:
    """The arguments of `torch.compile` that ``compile=`` asks for; None for False.

    `parallelized`: ``parallelize=`` is given, too.

    Raises `PlanError` for an option that is wrong or not supported.
    """
    if option is False:
        return None
    if parallelized:
        raise PlanError(
            "compile= and parallelize= are both given: expected one of them, since a hook changes the modules that the "
            "compiled code was generated for. Leave compile= out"
        )
    if option is not True and not isinstance(option, Mapping):
        raise PlanError(
            "compile=: expected True, False or the arguments of torch.compile as a dict, found "
            f"{text_of(option)}: give one such as {{'mode': 'max-autotune-no-cudagraphs'}}"
        )
    options = {} if option is True else dict(option)
    graphed = options.get("mode") in _GRAPHED_MODES or (options.get("options") or {}).get(_GRAPHS)
    if graphed or options.get("backend") == "cudagraphs":
        raise PlanError(
            "compile= asks for CUDA graphs, whose results are overwritten by the next run while several microbatches "
            'are in flight: expected a mode without graphs. Give {"mode": "max-autotune-no-cudagraphs"}, or True'
        )
    return options


def compile_chain(chain: LayerChain, options: Mapping[str, Any] | None, layerwise: Collection[int] = ()) -> LayerChain:
    """`chain` with stages that are compiled when they first run, also in evaluation mode.

    `options`: the arguments of `torch.compile`; None compiles nothing. `layerwise`: the first layers of the stages in
    which every layer is a region of its own.
    """
    if options is None:
        return chain
    result: LayerChain

    @cache
    def evaluation() -> LayerChain:
        evaluated = chain.evaluation()
        return result if evaluated is chain else compile_chain(evaluated, options)

    values = {item.name: getattr(chain, item.name) for item in fields(LayerChain)} | {"evaluation": evaluation}
    result = _CompiledChain(**values, options=options, layerwise=frozenset(layerwise))
    return result


@dataclass(frozen=True, eq=False)
class _CompiledChain(LayerChain):
    options: Mapping[str, Any]
    layerwise: frozenset[int]

    def stage(self, start: int, stop: int) -> StageModule:
        ends = self.cut(start), self.cut(stop)
        return CompiledStage(self.layers[start:stop], start, *ends, self.options, start in self.layerwise)


@dataclass(frozen=True, slots=True, eq=False)
class _Region:
    """Describes one region. All copies of its stage share it."""

    start: int
    """The index of its first layer in the stage."""
    random: bool
    reads: tuple[str, ...]
    returns: tuple[str, ...]
    kept: frozenset[str]
    """The values that later regions read or the stage returns."""
    run: Callable[..., tuple[Tensor, ...]]
    """The compiled function: it takes the module of the region, and the values `reads`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Region":
        # The compiled function must be one and the same for all copies.
        return self


class CompiledStage(StageModule):
    """A stage that runs as compiled regions."""

    def __init__(
        self,
        layers: Sequence[Layer],
        first: int,
        received: tuple[str, ...],
        sent: tuple[str, ...],
        options: Mapping[str, Any],
        layerwise: bool,
    ) -> None:
        super().__init__(layers, first, received, sent)
        self.programs = nn.ModuleList()
        regions = []
        for start, stop in _divide(self.random, layerwise):
            reads = _inputs_of(layers[start:stop])
            kept = frozenset(name for layer in layers[stop:] for name in layer.inputs).union(sent)
            program, returns = _generate(layers[start:stop], reads, kept, f"layers_{first + start}_{first + stop - 1}")
            self.programs.append(program)
            run = torch.compile(type(program).forward, **options)
            regions.append(_Region(start, self.random[start], reads, returns, kept, run))
        self.regions = tuple(regions)
        self.layerwise = layerwise

    def forward(
        self,
        received: Sequence[Tensor],
        inputs: Mapping[str, Tensor],
        seed: int | None = None,
        layer_runner: LayerRunner | None = None,
    ) -> tuple[Tensor, ...]:
        """Like `StageModule.forward`; with a `layer_runner` the stage must have been compiled `layerwise`."""
        assert layer_runner is None or self.layerwise, "layers that are recomputed one by one are compiled one by one"
        values = dict(zip(self.received, received, strict=True))
        values.update((name, inputs[name]) for name in self.model_inputs)
        # A repetition that ends early, with all that it needs, may leave out attributes: compiled code sets them at its
        # end. Then the first one, which is watched, would not show what later ones change.
        whole = set_checkpoint_early_stop(False) if layer_runner is not None else nullcontext()
        with whole:
            values = self._run_regions(values, seed, layer_runner)
        return tuple(values[name] if name in values else inputs[name] for name in self.sent)

    def _run_regions(
        self, values: dict[str, Tensor], seed: int | None, layer_runner: LayerRunner | None
    ) -> dict[str, Tensor]:
        for index, region in enumerate(self.regions):
            arguments = [values[name] for name in region.reads]
            if layer_runner is None:
                results = self._run_region(index, seed, *arguments)
            else:
                results = layer_runner(self.layers[region.start], partial(self._run_region, index, seed), arguments)
            values.update(zip(region.returns, results, strict=True))
            values = {name: value for name, value in values.items() if name in region.kept}
        return values

    def _run_region(self, index: int, seed: int | None, *arguments: Tensor) -> tuple[Tensor, ...]:
        region = self.regions[index]
        streams = region.random and seed is not None
        with seeded(seed or 0, self.first + region.start, arguments) if streams else nullcontext():
            return region.run(self.programs[index], *arguments)


def _divide(random: Sequence[bool], layerwise: bool) -> Iterator[tuple[int, int]]:
    """The first layer of every region, and the first layer after it."""
    keys = [index if layerwise or drawn else -1 for index, drawn in enumerate(random)]
    start = 0
    for _, group in groupby(keys):
        stop = start + len(list(group))
        yield start, stop
        start = stop


def _inputs_of(layers: Sequence[Layer]) -> tuple[str, ...]:
    """The values that `layers` read and do not make themselves."""
    made: set[str] = set()
    reads: dict[str, None] = {}
    for layer in layers:
        reads.update((name, None) for name in layer.inputs if name not in made)
        made.update(layer.outputs)
    return tuple(reads)


def _generate(
    layers: Sequence[Layer], reads: tuple[str, ...], kept: frozenset[str], name: str
) -> tuple[GraphModule, tuple[str, ...]]:
    """A module whose generated ``forward(*reads)`` runs `layers`, and the values that it returns.

    The module has a class of its own. The copies of a region share this class and its code, by which PyTorch caches
    compiled graphs.
    """
    graph = Graph()
    values: dict[str, Node] = {value: graph.placeholder(f"value_{index}") for index, value in enumerate(reads)}
    changed: dict[str, None] = {}
    for index, layer in enumerate(layers):
        for value in layer.mutates:
            values[value] = graph.call_function(torch.clone, (values[value],))
        results = graph.call_module(f"layer_{index}", tuple(values[value] for value in layer.inputs))
        for position, value in enumerate(layer.outputs):
            values[value] = graph.call_function(operator.getitem, (results, position))
        changed.update(dict.fromkeys((*layer.mutates, *layer.outputs)))
    returns = tuple(value for value in changed if value in kept)
    graph.output(tuple(values[value] for value in returns))
    return GraphModule({f"layer_{i}": layer.module for i, layer in enumerate(layers)}, graph, name), returns
