"""A model as a chain of layers with named values between them.

This is what capture makes of a model, whichever front door it came through, and all that the profiler, the runtime and
the oracle know of it. A *value* is one tensor with a name. A layer reads some values and writes others; what is written
before a cut and read after it crosses the cut, skip connections included. The model's own inputs are values that never
cross a cut: every rank takes them from its own copy of the batch.

Laws of this file:
  1. It knows no schedule, no rank and no transport.
  2. The parameters and buffers of a layer's module are the model's own objects, not copies.
  3. Only tensors are values. Whatever else the model passes between its blocks is a constant of the capture.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.capturing.model_forms import ModelInputs, ModelOutput
from penstock.capturing.operators import OperatorCall
from penstock.capturing.randomness import seeded
from penstock.capturing.reads import Reads
from penstock.errors import PlanError
from penstock.torch_internals.modules import runs_plainly
from penstock.values.crossings import Crossing

LayerRunner: TypeAlias = Callable[
    [nn.Module | None, Callable[..., tuple[Tensor, ...]], Sequence[Tensor]], tuple[Tensor, ...]
]
"""Runs a layer: its module (None for the loss), what computes it, and the arguments of that."""
Results: TypeAlias = Callable[..., tuple[Tensor, ...]]
TensorKind: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""The shape and the type of a tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer: what the profiler measures and a cut can fall between."""

    name: str
    """Where it stands in the model, such as ``transformer.h.0``."""
    module: nn.Module
    """``forward(*inputs)`` takes the values `inputs` and returns a tuple of tensors, the values `outputs`."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    random: bool = False
    """Whether it draws random numbers (dropout in training mode)."""
    mutates: tuple[str, ...] = ()
    """Those of `inputs` that it writes in place."""
    output_kinds: tuple[TensorKind, ...] = ()
    """Of each of `outputs`, for the captured sample; empty where this is not known."""
    operators: tuple[OperatorCall, ...] = ()
    """The operators that its forward runs on the captured sample."""
    volatile: tuple[str, ...] = ()
    """Those of `outputs` that share memory with a buffer that it writes: its next forward changes them."""
    views: tuple[tuple[str, str], ...] = ()
    """Those of `outputs` that share memory with one of `inputs`, each with that one."""
    differentiable: frozenset[str] = frozenset()
    """Those of `outputs` that require a gradient on the captured sample."""
    rewrites: str = ""
    """An attribute of a module in it that both its forward and its backward change, as a checkpoint does that runs a
    forward again; empty if there is none."""
    shares: tuple[str, ...] = ()
    """The objects that blocks of the model share and can write, each with the code, which made it one layer."""

    @property
    def output_bytes(self) -> tuple[float, ...]:
        """The sizes of `outputs` for the captured sample; empty where they are not known."""
        return tuple(float(math.prod(shape) * dtype.itemsize) for shape, dtype in self.output_kinds)


def follow_memory(layers: Sequence[Layer]) -> tuple[dict[str, str], frozenset[str]]:
    """The earliest value with the memory of each value that shares it, and the values that `layers` write in place,
    themselves or through what shares memory with them.
    """
    roots: dict[str, str] = {}
    mutated: set[str] = set()
    for layer in layers:
        mutated.update(roots.get(name, name) for name in layer.mutates)
        roots.update({output: roots.get(source, source) for output, source in layer.views})
    return roots, frozenset(mutated)


class StageModule(nn.Module):
    """Consecutive layers of a chain as one module.

    `forward` takes the values that cross the cut before it, in the order of `received`, and the model's inputs by name;
    it returns the values that cross the cut after it, in the order of `sent`.
    """

    def __init__(self, layers: Sequence[Layer], first: int, received: tuple[str, ...], sent: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.module for layer in layers)
        self.first = first
        """Index of the first layer in the chain."""
        self.received = received
        self.sent = sent
        self.sources = (1,) * len(received)
        """How many stages before this one each received value comes from."""
        self.targets = (1,) * len(sent)
        """How many stages behind this one each sent value goes to."""
        self.names = tuple(layer.name for layer in layers)
        self.blocks: Mapping[str, nn.Module] = {}
        """The model's own modules in the layers, by their names in the model: filled for a ``parallelize`` hook."""
        self.reads = tuple(layer.inputs for layer in layers)
        self.writes = tuple(layer.outputs for layer in layers)
        self.random = tuple(layer.random for layer in layers)
        self.written = tuple(layer.mutates for layer in layers)
        self._volatile = frozenset(name for layer in layers for name in layer.volatile)
        written = {name for layer in layers for name in layer.outputs}
        self.mutates = follow_memory(layers)[1] - written
        self.differentiable = frozenset(name for layer in layers for name in layer.differentiable)
        """The values that it makes and that require a gradient on the captured sample."""
        self.model_inputs = tuple(dict.fromkeys(name for names in self.reads for name in names if name not in written))
        self.model_inputs = tuple(name for name in self.model_inputs if name not in received)
        self._dead = _last_reads(self.reads, keep=frozenset(sent))
        self._calls: tuple[Results, ...] | None = None
        """What the first forward found to call for each layer: these are modules of ours around the user's, and one
        without hooks need not look for them."""
        self._lay_out()

    def reroute(self, sources: Mapping[str, int], targets: Mapping[str, int]) -> None:
        """Sends and receives no more than these values, from and to stages so far away; the others pass by unread."""
        self.received = tuple(name for name in self.received if name in sources)
        self.sent = tuple(name for name in self.sent if name in targets)
        self.sources = tuple(sources[name] for name in self.received)
        self.targets = tuple(targets[name] for name in self.sent)
        self._lay_out()

    def _lay_out(self) -> None:
        """Works out at which place in a list each value lies while the layers run: first what was received, then the
        model's inputs, then what each layer returns.
        """
        written = {name for names in self.writes for name in names}
        passed = (name for name in self.sent if name not in written and name not in self.received)
        self.fetched = tuple(dict.fromkeys((*self.model_inputs, *passed)))
        """Those of the model's inputs that `forward` looks at."""
        places = {name: place for place, name in enumerate((*self.received, *self.fetched))}
        self._cloned = tuple(places[name] for name in self.mutates)
        steps: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]] = []
        length = len(places)
        for reads, changes, writes, dead in zip(self.reads, self.written, self.writes, self._dead, strict=True):
            own = [tuple(places[name] for name in names) for names in (reads, changes, dead)]
            steps.append((own[0], own[1], own[2], len(writes)))
            places.update((name, length + index) for index, name in enumerate(writes))
            length += len(writes)
        self._steps = tuple(steps)
        """Of each layer: the places that it reads, that it writes in, and that no layer reads after it; and how many
        values it returns."""
        self._results = tuple(places[name] for name in self.sent)
        self._copied = tuple(places[name] for name in self.sent if name in self._volatile)

    def forward(
        self,
        received: Sequence[Tensor],
        inputs: Mapping[str, Tensor],
        seed: int | None = None,
        layer_runner: LayerRunner | None = None,
    ) -> tuple[Tensor, ...]:
        """One microbatch through the layers. `seed` (of the microbatch) makes the random layers repeatable.

        `layer_runner` runs each layer in place of the plain call, so that it can run it again on the same arguments.
        """
        assert len(received) == len(self.received), "a value for each name"
        values: list[Any] = [*received, *[inputs[name] for name in self.fetched]]
        for place in self._cloned:
            # A layer may write in place; what was received is a leaf of autograd or the user's own batch.
            values[place] = values[place].clone()
        calls = self._calls
        if calls is None:
            calls = self._calls = tuple([layer.forward if runs_plainly(layer) else layer for layer in self.layers])
        for index, (call, (reads, changes, dead, returned)) in enumerate(zip(calls, self._steps, strict=True)):
            arguments = [values[place] for place in reads]
            if layer_runner is not None:
                results = layer_runner(self.layers[index], partial(self._run_apart, index, call, seed), arguments)
                for place, tensor in zip(changes, results[returned:], strict=True):
                    values[place] = tensor
                results = results[:returned]
            elif seed is None or not self.random[index]:
                results = call(*arguments)
            else:
                results = self._run(index, call, seed, arguments)
            for place in dead:
                values[place] = None
            values += results
        for place in self._copied:
            values[place] = values[place].clone()
        return tuple([values[place] for place in self._results])

    def _run(self, index: int, call: Results, seed: int | None, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if seed is None or not self.random[index]:
            return call(*arguments)
        with seeded(seed, self.first + index, arguments):
            return call(*arguments)

    def _run_apart(self, index: int, call: Results, seed: int | None, *arguments: Tensor) -> tuple[Tensor, ...]:
        """What the layer writes in place it writes in copies, which are returned behind its results."""
        own = dict(zip(self.reads[index], arguments, strict=True))
        own.update({name: own[name].clone() for name in self.written[index]})
        results = self._run(index, call, seed, [own[name] for name in self.reads[index]])
        return (*results, *(own[name] for name in self.written[index]))


@dataclass(frozen=True, eq=False)
class LayerChain:
    """A model as a chain of layers, in the mode (training or evaluation) that it was captured in."""

    layers: tuple[Layer, ...]
    inputs: ModelInputs
    output: ModelOutput
    parameters: Mapping[str, nn.Parameter]
    """All parameters under all their original names (a tied one has several)."""
    buffers: Mapping[str, Tensor]
    """The buffers of the model's state dict, under their original names."""
    evaluation: Callable[[], "LayerChain"] = field(repr=False)
    """The same layers for the evaluation mode, over the same parameters and buffers; captured on the first call. The
    model's own modules run in the mode that they are in: call the model's ``eval()`` before."""
    communicates: bool = field(default=False, kw_only=True)
    """Whether the model was seen to wait for other processes in its forward, so that all must run it together."""
    reads: Reads = field(default_factory=Reads, kw_only=True, repr=False)
    """What the code outside of its blocks has read; in evaluation mode, too, once that is captured."""

    @property
    def shares(self) -> tuple[str, ...]:
        """Lists the `shares` of all layers."""
        return tuple(text for layer in self.layers for text in layer.shares)

    def cut(self, index: int) -> tuple[str, ...]:
        """The values that cross the cut before layer `index`, in the order in which they were written.

        ``cut(0)`` is empty: the model's inputs are not sent. ``cut(len(layers))`` is what the output is built from, in
        the order of ``output.values``.
        """
        return self._cuts[index]

    @cached_property
    def _cuts(self) -> tuple[tuple[str, ...], ...]:
        cuts = []
        for index in range(len(self.layers)):
            needed = set(self.output.values)
            for layer in self.layers[index:]:
                needed.update(layer.inputs)
            written = dict.fromkeys(name for layer in self.layers[:index] for name in layer.outputs)
            cuts.append(tuple(name for name in written if name in needed))
        return (*cuts, self.output.values)

    def stage(self, start: int, stop: int) -> StageModule:
        """Layers `start` up to `stop` as one module over the model's own parameters."""
        return StageModule(self.layers[start:stop], start, self.cut(start), self.cut(stop))

    @cached_property
    def readers(self) -> Mapping[str, tuple[int, ...]]:
        """The layers that hold each parameter and buffer, by name; empty for one that the model never uses."""
        held = [
            {id(tensor) for tensor in (*layer.module.parameters(), *layer.module.buffers())} for layer in self.layers
        ]
        return {
            name: tuple(index for index, ids in enumerate(held) if id(tensor) in ids)
            for name, tensor in (*self.parameters.items(), *self.buffers.items())
        }


def crossings_of(chain: LayerChain) -> tuple[Crossing, ...]:
    """The values of `chain` that layers make and later ones read; the model's output is read by the last layer."""
    last = len(chain.layers) - 1
    reads: dict[str, dict[int, None]] = {}
    for index, layer in enumerate(chain.layers):
        for name in layer.inputs:
            reads.setdefault(name, {})[index] = None
    for name in chain.output.values:
        reads.setdefault(name, {})[last] = None
    found = []
    for index, layer in enumerate(chain.layers):
        for position, name in enumerate(layer.outputs):
            read = tuple(reader for reader in reads.get(name, {}) if reader > index)
            size = {"size_bytes": layer.output_bytes[position]} if layer.output_bytes else {}
            found += [Crossing(name, index, read, **size)] if read else []
    return tuple(found)


def require_cuts(layers: int, stages: int, shares: Sequence[str]) -> None:
    """Raises `PlanError` if a chain of `layers` layers is to be cut into `stages` stages and has no cut at all, or too
    few since blocks share objects, as `shares` has it.
    """
    if shares and layers < stages:
        raise PlanError(
            f"stages: expected at most {layers}, found {stages}: blocks that share an object which one of them can "
            f"write are one layer. Shared are {'; '.join(shares)}. A stage in another process would not see the write, "
            "and microbatches come in another order. Give every block an object of its own, return what it hands on "
            "and pass it to the next block, or write the object before the pipeline is built"
        )
    if layers == 1 < stages:
        raise PlanError(
            f"stages: expected 1, found {stages}: the model has no blocks between which it could be cut, and is one "
            "layer. Blocks are modules that its forward calls as block(x), such as the elements of an nn.ModuleList. "
            "torch.fx and torch.compile hide them, and blocks that share a buffer which one of them changes are one "
            "layer. Pass blocks as they were before, in an nn.ModuleList or a list; compile=True compiles every stage"
        )


def _last_reads(reads: Sequence[tuple[str, ...]], keep: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    """The values that no layer after each one reads and that are not kept: they can be freed after it."""
    seen = set(keep)
    dead: list[tuple[str, ...]] = []
    for names in reversed(reads):
        dead.append(tuple(dict.fromkeys(name for name in names if name not in seen)))
        seen.update(names)
    return tuple(reversed(dead))
