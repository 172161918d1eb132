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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.capturing.randomness import seeded
from penstock.errors import CaptureError

__all__ = ["Around", "Layer", "LayerChain", "ModelInputs", "ModelOutput", "StageModule", "check_constant"]

Around: TypeAlias = Callable[
    [nn.Module | None, Callable[..., tuple[Tensor, ...]], Sequence[Tensor]], tuple[Tensor, ...]
]
"""Runs a layer: its module (None for the loss), what computes it, and the arguments of that."""


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
    output_bytes: tuple[float, ...] = ()
    """Of each of `outputs`, for the captured sample; empty where nobody has looked."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """The form of the arguments that the model was captured with."""

    names: tuple[str, ...]
    """A value name for every leaf of ``(args, kwargs)``, in pytree order."""
    structure: pytree.TreeSpec
    constants: Mapping[str, Any]
    """The leaves that are not tensors. The capture holds for these values only."""
    batched: frozenset[str]
    """The tensors whose dimension 0 counts samples; the others go whole to every microbatch."""
    microbatch_size: int
    """Samples in the captured sample."""
    sizes: Mapping[str, tuple[tuple[int, int | None], ...]] = field(default_factory=dict)
    """For a tensor's dimensions: the least and the greatest size that the capture holds for, None where none is."""
    equal: tuple[tuple[tuple[str, int], ...], ...] = ()
    """Groups of dimensions, as tensor and index, that the capture holds for only if they are of one size."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The types that the capture holds for; the model's code may ask whether a mask is boolean."""

    def read(self, batch: Any) -> dict[str, Tensor]:
        """The tensors of `batch` by value name.

        `batch`: a tuple or list of positional arguments, a mapping of keywords, or the one argument, which may itself
        be a list, a dict or a named tuple if it was in the sample. Raises `CaptureError` as `bind` does.
        """
        args, kwargs = self.structure.unflatten(self.names)
        single = len(args) == 1 and not kwargs and type(batch) is type(args[0])
        # A plain tuple of one is the arguments, as everywhere.
        if single and not (type(batch) is tuple and len(batch) == 1):
            return self.bind((batch,), {})
        match batch:
            case Mapping():
                return self.bind((), batch)
            case tuple() | list():
                return self.bind(tuple(batch), {})
            case _:
                return self.bind((batch,), {})

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of ``model(*args, **kwargs)`` by value name.

        Raises `CaptureError` if the arguments differ from the captured ones in structure or in a constant.
        """
        captured_args, captured_kwargs = self.structure.unflatten(self.names)
        if sorted(kwargs) != sorted(captured_kwargs) or len(args) != len(captured_args):
            raise CaptureError(
                f"the model was captured with {_signature(len(captured_args), captured_kwargs)} and is now called with "
                f"{_signature(len(args), kwargs)}: pass the same arguments as in sample=, or capture again"
            )
        ordered = {name: kwargs[name] for name in captured_kwargs}
        names: Sequence[str] = [*captured_args, *captured_kwargs.values()]
        leaves, structure = [*args, *ordered.values()], self.structure
        # Nothing is nested in most calls, neither then nor now, and need not be looked through.
        if not all(type(name) is str and isinstance(leaf, Tensor) for name, leaf in zip(names, leaves, strict=True)):
            names = self.names
            leaves, structure = pytree.tree_flatten((args, ordered))
        if structure != self.structure:
            raise CaptureError(
                f"the arguments have another structure than the captured sample: expected {self.structure}, "
                f"found {structure}. Pass the same nesting of tuples, lists and dicts as in sample="
            )
        tensors: dict[str, Tensor] = {}
        for name, leaf in zip(names, leaves, strict=True):
            if name in self.constants:
                check_constant(name, self.constants[name], leaf)
            elif not isinstance(leaf, Tensor):
                raise CaptureError(
                    f"{name} was a tensor in sample= and is now {_shown(leaf)}: pass a tensor, or capture again"
                )
            else:
                tensors[name] = leaf
                if leaf.dtype != self.dtypes.get(name, leaf.dtype):
                    raise CaptureError(
                        f"{name} was {self.dtypes[name]} in sample= and is now {leaf.dtype}, for which the model's "
                        f"code may do something else: pass it as .to({self.dtypes[name]}), or capture again"
                    )
                _check_sizes(name, self.sizes.get(name, ()), leaf, free=name in self.batched)
        for group in self.equal:
            found = {f"dimension {index} of {name}": tensors[name].shape[index] for name, index in group}
            if len(set(found.values())) > 1:
                raise CaptureError(
                    f"the capture holds for equal sizes only, which the model's code asked for: {found}. Pass tensors "
                    "that agree there, or capture again with a sample= of the new shapes"
                )
        return tensors

    def check_samples(self, samples: int) -> None:
        """Raises `CaptureError` if the capture does not hold for a microbatch of so many samples."""
        for name in self.names:
            bounds = self.sizes.get(name, ())
            if name in self.batched and bounds and not _fits(samples, *bounds[0]):
                raise CaptureError(
                    f"{name} has {samples} sample(s) in a microbatch, but the capture holds for "
                    f"{_size_text(*bounds[0])}: for other numbers the model's code may do something else. Pass larger "
                    "or smaller batches, or use other microbatches="
                )


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutput:
    """The form of what the model returns."""

    structure: pytree.TreeSpec
    leaves: tuple[str | None, ...]
    """For every leaf, the value that it is; None for a leaf that is a constant."""
    constants: tuple[Any, ...]
    """For every leaf, its constant (None where the leaf is a value)."""

    @property
    def values(self) -> tuple[str, ...]:
        """The values that the output is built from, each once."""
        return tuple(dict.fromkeys(name for name in self.leaves if name is not None))

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """What the model returns, of the same types as the model's own output, out of a tensor for each of `values`."""
        if self.structure.is_leaf() and len(tensors) == 1:
            return tensors[0]
        values = dict(zip(self.values, tensors, strict=True))
        leaves = [
            constant if name is None else values[name]
            for name, constant in zip(self.leaves, self.constants, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.structure)


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
        self.reads = tuple(layer.inputs for layer in layers)
        self.writes = tuple(layer.outputs for layer in layers)
        self.random = tuple(layer.random for layer in layers)
        self.written = tuple(layer.mutates for layer in layers)
        written = {name for layer in layers for name in layer.outputs}
        self.mutates = frozenset(name for layer in layers for name in layer.mutates) - written
        self.model_inputs = tuple(dict.fromkeys(name for names in self.reads for name in names if name not in written))
        self.model_inputs = tuple(name for name in self.model_inputs if name not in received)
        self._dead = _last_reads(self.reads, keep=frozenset(sent))
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
        self._fetched = tuple(dict.fromkeys((*self.model_inputs, *passed)))
        places = {name: place for place, name in enumerate((*self.received, *self._fetched))}
        self._cloned = tuple(places[name] for name in self.mutates)
        steps: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]] = []
        length = len(places)
        for reads, changes, writes, dead in zip(self.reads, self.written, self.writes, self._dead, strict=True):
            own = [tuple(places[name] for name in names) for names in (reads, changes, dead)]
            steps.append((own[0], own[1], own[2], len(writes)))
            places.update((name, length + index) for index, name in enumerate(writes))
            length += len(writes)
        self._steps = tuple(steps)
        """Of each layer: the places that it reads, that it writes in, and that nobody reads after it; and how many
        values it returns."""
        self._results = tuple(places[name] for name in self.sent)

    def forward(
        self,
        received: Sequence[Tensor],
        inputs: Mapping[str, Tensor],
        seed: int | None = None,
        around: Around | None = None,
    ) -> tuple[Tensor, ...]:
        """One microbatch through the layers. `seed` (of the microbatch) makes the random layers repeatable.

        `around` runs each layer in place of the plain call, so that it can run it again on the same arguments.
        """
        assert len(received) == len(self.received), "a value for each name"
        values: list[Any] = [*received, *[inputs[name] for name in self._fetched]]
        for place in self._cloned:
            # A layer may write in place; what was received is a leaf of autograd or the user's own batch.
            values[place] = values[place].clone()
        for index, (layer, step) in enumerate(zip(self.layers, self._steps, strict=True)):
            reads, changes, dead, returned = step
            arguments = [values[place] for place in reads]
            if around is not None:
                results = around(layer, partial(self._run_apart, index, layer, seed), arguments)
                for place, tensor in zip(changes, results[returned:], strict=True):
                    values[place] = tensor
                results = results[:returned]
            else:
                results = self._run(index, layer, seed, arguments)
            for place in dead:
                values[place] = None
            values += results
        return tuple([values[place] for place in self._results])

    def _run(self, index: int, layer: nn.Module, seed: int | None, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...]
        if seed is None or not self.random[index]:
            results = layer(*arguments)
        else:
            with seeded(seed, self.first + index, arguments):
                results = layer(*arguments)
        return results

    def _run_apart(self, index: int, layer: nn.Module, seed: int | None, *arguments: Tensor) -> tuple[Tensor, ...]:
        """What the layer writes in place it writes in copies, which are returned behind its results."""
        own = dict(zip(self.reads[index], arguments, strict=True))
        own.update({name: own[name].clone() for name in self.written[index]})
        results = self._run(index, layer, seed, [own[name] for name in self.reads[index]])
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
    """The same layers in evaluation mode, over the same parameters and buffers; captured on the first call."""

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
        """For every parameter and buffer name, the layers that hold it; empty for one that the model never uses."""
        held = [
            {id(tensor) for tensor in (*layer.module.parameters(), *layer.module.buffers())} for layer in self.layers
        ]
        return {
            name: tuple(index for index, ids in enumerate(held) if id(tensor) in ids)
            for name, tensor in (*self.parameters.items(), *self.buffers.items())
        }


def _last_reads(reads: Sequence[tuple[str, ...]], keep: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    """For every layer, the values that no later layer reads and that are not kept: they can be freed after it."""
    seen = set(keep)
    dead: list[tuple[str, ...]] = []
    for names in reversed(reads):
        dead.append(tuple(dict.fromkeys(name for name in names if name not in seen)))
        seen.update(names)
    return tuple(reversed(dead))


def _signature(positional: int, keywords: Mapping[str, Any]) -> str:
    return f"{positional} positional argument(s) and keywords {sorted(keywords)}"


def _check_sizes(name: str, sizes: tuple[tuple[int, int | None], ...], tensor: Tensor, free: bool) -> None:
    """`free`: dimension 0 counts samples, of which each microbatch will have fewer."""
    if not sizes:
        return
    bounds = list(zip(sizes, tensor.shape, strict=False))[int(free) :]
    if len(sizes) != tensor.dim() or not all(_fits(size, *bound) for bound, size in bounds):
        expected = ", ".join(_size_text(least, most) for least, most in sizes)
        raise CaptureError(
            f"{name} has shape {tuple(tensor.shape)}, but the capture holds for ({expected}): for other sizes the "
            "model's code may do something else. Pass such a tensor, or capture again with a sample= of the new shape"
        )


def _fits(size: int, least: int, most: int | None) -> bool:
    return least <= size and (most is None or size <= most)


def _size_text(least: int, most: int | None) -> str:
    if most is None:
        return f"at least {least}" if least else "any"
    return str(least) if least == most else f"{least} to {most}" if least else f"at most {most}"


def check_constant(name: str, captured: object, found: object) -> None:
    """Raises `CaptureError` unless `found`, which is not a tensor, equals what was `captured`."""
    if not _same(captured, found):
        raise CaptureError(
            f"{name} was {_shown(captured)} when the model was captured and is now {_shown(found)}. A value that is "
            "not a tensor is fixed by the capture: pass the same one, or capture again with the new one in sample="
        )


def _same(captured: object, found: object) -> bool:
    if captured is found:
        return True
    try:
        return type(captured) is type(found) and bool(captured == found)
    except Exception:
        # Objects that hold arrays may not say whether they are equal.
        return False


def _shown(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
