"""Compiling stages: what a stage computes as one graph, for all versions of its weights and for every schedule.

A stage is compiled in *parts*: each random layer is a part of its own, since it starts a random stream of its own
outside of what is compiled, and the layers between two of them are one part. A stage without random layers is one part.
A part is a generated function that calls its layers; the layers are an argument, so the copies of a stage for several
versions and replicas, which share their generated code, run the one graph that the first of them compiled.

Laws of this file:
  1. What a layer writes in place it writes in a copy, which the part returns: no graph writes what it was given, but
     for the model's buffers.
  2. Random generators are set and given back outside of what is compiled.
  3. The evaluation, which is another capture of the same layers, has graphs of its own.
"""

import inspect
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

from penstock.capturing.chain import Around, Layer, LayerChain, StageModule
from penstock.capturing.randomness import seeded
from penstock.errors import PlanError

__all__ = ["Compilation", "CompiledStage", "compile_chain", "read_compilation"]

_WITHOUT_GRAPHS: Mapping[str, str | None] = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
"""The modes of `torch.compile` that ask for CUDA graphs, and what is left of them without."""
_GRAPHS = "triton.cudagraphs"


@dataclass(frozen=True, slots=True)
class Compilation:
    """How stages are compiled."""

    options: Mapping[str, Any]
    """The arguments of `torch.compile`. They never ask for CUDA graphs: PyTorch's own are overwritten by their next
    run, and several microbatches are in flight at once."""
    graphed: bool = False
    """Whether what a stage does is recorded as CUDA graphs, one for each microbatch in flight."""


def read_compilation(wish: bool | Mapping[str, Any], parallelized: bool = False) -> Compilation | None:
    """What ``compile=`` asks for; None for False. `parallelized`: whether there is a hook.

    Raises `PlanError` for what cannot be done.
    """
    if wish is False:
        return None
    if parallelized:
        raise PlanError(
            "compile= and parallelize= are both given: expected one of them, since a hook changes the modules that the "
            "compiled code was generated for. Leave compile= out"
        )
    if wish is not True and not isinstance(wish, Mapping):
        raise PlanError(
            f"compile={wish!r}: expected True, False or the arguments of torch.compile as a dict, such as "
            '{"mode": "max-autotune-no-cudagraphs"}'
        )
    options = {} if wish is True else dict(wish)
    known = set(inspect.signature(torch.compile).parameters) - {"model", "disable"}
    if unknown := sorted(options.keys() - known):
        raise PlanError(
            f"compile= has {', '.join(map(repr, unknown))}: expected arguments of torch.compile, which are "
            f"{', '.join(sorted(known))}"
        )
    if options.get("backend") == "cudagraphs":
        raise PlanError(
            "compile= has the backend 'cudagraphs', whose results are overwritten by its next run, and several "
            'microbatches are in flight at once: expected {"mode": "reduce-overhead"}, with which Penstock records a '
            "graph for each of them"
        )
    mode, inner = options.get("mode"), dict(options.get("options") or {})
    graphed = bool(inner.pop(_GRAPHS, mode in _WITHOUT_GRAPHS))
    if mode in _WITHOUT_GRAPHS:
        options["mode"] = _WITHOUT_GRAPHS[str(mode)]
    if "options" in options:
        options["options"] = inner or None
    return Compilation(options, graphed)


def compile_chain(chain: LayerChain, compilation: Compilation | None, apart: Collection[int] = ()) -> LayerChain:
    """`chain`, whose stages are compiled when they first run; in evaluation mode, too.

    `compilation`: None compiles nothing. `apart`: the first layers of the stages that recompute layer by layer, of
    which every layer is a part of its own.
    """
    if compilation is None:
        return chain
    result: LayerChain

    @cache
    def evaluation() -> LayerChain:
        evaluated = chain.evaluation()
        return result if evaluated is chain else compile_chain(evaluated, compilation)

    values = {item.name: getattr(chain, item.name) for item in fields(LayerChain)} | {"evaluation": evaluation}
    result = _CompiledChain(**values, compilation=compilation, apart=frozenset(apart))
    return result


@dataclass(frozen=True, eq=False)
class _CompiledChain(LayerChain):
    compilation: Compilation
    apart: frozenset[int]

    def stage(self, start: int, stop: int) -> StageModule:
        ends = self.cut(start), self.cut(stop)
        return CompiledStage(self.layers[start:stop], start, *ends, self.compilation, start in self.apart)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What is known of a part, which is the same for all copies of its stage."""

    start: int
    """Index of its first layer in the stage."""
    random: bool
    reads: tuple[str, ...]
    returns: tuple[str, ...]
    kept: frozenset[str]
    """The values that are still wanted after it."""
    run: Callable[..., tuple[Tensor, ...]]
    """Takes the module of the part, and `reads`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Part":
        # The compiled function must be one and the same for all copies.
        return self


class CompiledStage(StageModule):
    """A stage that runs as compiled parts."""

    def __init__(
        self,
        layers: Sequence[Layer],
        first: int,
        received: tuple[str, ...],
        sent: tuple[str, ...],
        compilation: Compilation,
        apart: bool,
    ) -> None:
        super().__init__(layers, first, received, sent)
        self.graphed = compilation.graphed
        """Whether its work in training is to be recorded as CUDA graphs."""
        self.programs = nn.ModuleList()
        parts = []
        for start, stop in _cut(self.random, apart):
            reads = _reads(layers[start:stop])
            kept = frozenset(name for layer in layers[stop:] for name in layer.inputs).union(sent)
            program, returns = _generate(layers[start:stop], reads, kept, f"layers_{first + start}_{first + stop - 1}")
            self.programs.append(program)
            run = torch.compile(type(program).forward, **compilation.options)
            parts.append(_Part(start, self.random[start], reads, returns, kept, run))
        self.parts = tuple(parts)
        self.apart = apart

    def forward(
        self,
        received: Sequence[Tensor],
        inputs: Mapping[str, Tensor],
        seed: int | None = None,
        around: Around | None = None,
    ) -> tuple[Tensor, ...]:
        """As `StageModule.forward`; `around` runs each part, so it wants a stage that was compiled `apart`."""
        assert around is None or self.apart, "layers that are to run again one by one are compiled one by one"
        values = dict(zip(self.received, received, strict=True))
        values.update((name, inputs[name]) for name in self.model_inputs)
        for index, part in enumerate(self.parts):
            arguments = [values[name] for name in part.reads]
            if around is None:
                results = self._run_part(index, seed, *arguments)
            else:
                results = around(self.layers[part.start], partial(self._run_part, index, seed), arguments)
            values.update(zip(part.returns, results, strict=True))
            values = {name: value for name, value in values.items() if name in part.kept}
        return tuple(values[name] if name in values else inputs[name] for name in self.sent)

    def _run_part(self, index: int, seed: int | None, *arguments: Tensor) -> tuple[Tensor, ...]:
        part = self.parts[index]
        streams = part.random and seed is not None
        with seeded(seed or 0, self.first + part.start, arguments) if streams else nullcontext():
            return part.run(self.programs[index], *arguments)


def _cut(random: Sequence[bool], apart: bool) -> Iterator[tuple[int, int]]:
    """First and last but one layer of every part."""
    keys = [index if apart or drawn else -1 for index, drawn in enumerate(random)]
    start = 0
    for _, group in groupby(keys):
        stop = start + len(list(group))
        yield start, stop
        start = stop


def _reads(layers: Sequence[Layer]) -> tuple[str, ...]:
    """What `layers` read that they do not make."""
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

    A module of a class of its own: the copies of a part share this class and its code, and the code is what PyTorch
    keeps compiled graphs by.
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
