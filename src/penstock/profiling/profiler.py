"""Measures a model layer by layer on one microbatch: the profile that every plan starts from.

Each layer runs alone, on the values that reach it when the model runs on the sample, as the pipeline runs a stage:
received values are leaves of autograd, and the backward starts from gradients of the outputs and leaves gradients in
the parameters and in the received values. The method is that of PipeDream's profiler [PipeDream 2019, section 3.1]: one
device, a fixed microbatch size, many iterations. It takes the median instead of the mean, and measures forward and
backward separately, since schedules place them separately.

What the numbers of a layer mean:
  forward_seconds, backward_seconds  medians over the iterations. The backward is the whole of it, for inputs and
      parameters; it is 0 where no output needs a gradient. The optimizer is not in it. The loss is in the numbers of
      the last layer, as the last stage computes it, if it was given.
  weight_seconds  the median of the weight backward alone, of a split backward (`split_backward.py`). It is at most the
      whole backward, and 0 where the backward cannot be split or there is nothing to train. Every second iteration
      measures it.
  split_share  of the whole profile: how much longer the medians of the two halves of a split backward take than that of
      the whole one, over all layers whose backward can be split, relative to all backwards.
  update_seconds  the median of what the optimizer takes for copies of the layer's parameters, by themselves.
  cut_bytes  all values alive across the cut after this layer: its own outputs that are still needed, and everything
      from before it that rides along to a later layer. After the last layer: the model's output.
  wire_bytes  what a link carries of these with the given `wire_dtype`.
  saved_bytes  see `saved_tensors`. A storage that two layers save is charged to both, because a cut may come between
      them: the sum over a stage's layers is never below the bytes of the stage.
  workspace_bytes  see `workspaces`: of a forward beside the saved bytes and the output, or of a whole backward or an
      input backward beside the gradients of the parameters and of the output, whichever is more.
  library_bytes, fragmentation  those of the whole profile: the bytes in use after the warm-up that were not in use
      before it, and the fragmentation of the run that counts the bytes.
  parameter_bytes  the layer's trained parameters, each once. A parameter that several layers share is charged to each
      of them, because each rank that holds one of the layers holds a copy.
  frozen_bytes  what else its modules hold, each memory once: frozen parameters as they are packed, the scales that they
      have as attributes, buffers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.arguments import FLAG, TEXT, Rule, check_arguments, function, integer
from penstock.capturing.chain import Layer, LayerChain, crossings_of
from penstock.capturing.doors import capture
from penstock.capturing.initialization import read_device
from penstock.capturing.model_kinds import check_model
from penstock.capturing.module_copies import Copies
from penstock.capturing.preservation import KeptParameters, in_mode, kept_generators
from penstock.capturing.randomness import seeded
from penstock.capturing.sampled_models import chain_of_copies
from penstock.capturing.samples import read_sample
from penstock.errors import ProfileError
from penstock.profiling.clocks import Clock, calls_per_sample, clock_of, median_seconds
from penstock.profiling.devices import Model, Sample, device_name, device_of, first_device, modules_of, moved, placed
from penstock.profiling.spread_layers import held_bytes, local_bytes, longest, sharing_group
from penstock.profiling.workspaces import Meter, measure_saved_bytes, meter_of
from penstock.progress import progress_line
from penstock.runtime.execution.split_backward import WeightBackward, run_input_backward
from penstock.training.losses import LossFunction, compute_loss
from penstock.training.optimizers import MakeOptimizer, make_optimizers
from penstock.training.recipes import AUTOCAST, autocasting
from penstock.training.wire_codecs import WireCodec, WireDtype, read_wire_dtype, sent_bytes
from penstock.values.profiles import LayerProfile, Profile

Gauge: TypeAlias = Callable[[Callable[[], object]], float]
"""Runs work and measures it."""
Computing: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Makes the context in which a forward and its loss are computed."""


_UPDATES, _UPDATED_BYTES = 3, 2**26
"""How many updates of each layer are timed, by turns with those of other layers that have as many bytes of weights
together: more than stay in a cache, and little beside the model.
"""
_COUNT = integer(1).but("give one, or leave it out for the default")
_RULES: Mapping[str, Rule[Any]] = {
    "loss_fn": function(("output", "target"), "pass one such as torch.nn.functional.cross_entropy").optional,
    "optimizer": function(("parameters",), "pass one such as torch.optim.Adam", classes=True).optional,
    "autocast": AUTOCAST,
    "progress": FLAG.optional,
    "name": TEXT,
}


def profile(
    model: Model,
    sample: Sample,
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    optimizer: MakeOptimizer | None = torch.optim.Adam,
    autocast: torch.dtype | None = None,
    wire_dtype: WireDtype | None = None,
    iterations: int = 10,
    warmup: int = 2,
    device: torch.device | str | None = None,
    progress: bool | None = None,
    name: str = "",
    clock: Clock | None = None,
) -> Profile:
    """Seconds and bytes of every layer of `model`, for one microbatch, which is `sample`.

    `model` is a module, a list of layers, or a chain that was captured already; `sample` its positional arguments (a
    tuple), its keyword arguments (a mapping), or its only argument (a tensor). The model is run in training
    mode and left as it was found: weights, buffers, gradients, training flags, and PyTorch's random generators.

    With `loss_fn`, as in `Pipeline`, and the sample's `target`, the last layer is measured with
    ``loss_fn(output, target)``; the loss of a language model, for one, takes more memory than any of its layers.

    `optimizer`, as in `Pipeline`: makes one for copies of the trained parameters of each layer, whose steps are timed.
    None: updates take no time.

    `autocast`, as in `Pipeline`: forwards compute under it. Each casts the weights that it reads anew, as that of every
    microbatch does: that takes time, and what autograd keeps of it is in the saved bytes.

    `wire_dtype`, as in `Pipeline`: what links carry is counted beside what crosses the cuts. Encoding is not timed.

    The layers are run one after the other: `warmup` times to warm up, once to count bytes, `iterations` times for the
    medians. The calls of a layer that takes less than about 50 us are timed in groups. `device` (default: that of
    the model) may name another cpu or cuda device: a copy of the model is measured there. `progress` shows a line on
    stderr; None shows it on a terminal outside CI. `name` is the profile's (default: the model's class). `clock`
    replaces the device's own clock.

    Raises `CaptureError` for a model that cannot be captured, and `ProfileError`, with the layer's name, where a layer
    fails on the sample or an argument is out of range.
    """
    iterations = _COUNT.check("profile(iterations=)", iterations, ProfileError)
    warmup = _COUNT.check("profile(warmup=)", warmup, ProfileError)
    given = {"loss_fn": loss_fn, "optimizer": optimizer, "autocast": autocast, "progress": progress, "name": name}
    check_arguments("profile", _RULES, ProfileError, **given)
    codec = read_wire_dtype(wire_dtype, "profile(wire_dtype=)")
    if not isinstance(model, LayerChain):
        check_model(model, "profile")
    found = device_of(model)
    on = read_device("profile(device=)", device, ProfileError) if device is not None else found or first_device(sample)
    if found is not None and on != found:
        model = moved(model, found, on)
    clock = clock_of(on) if clock is None else clock
    sample, target = placed(sample, on), placed(target, on)
    modules, computing = modules_of(model), partial(autocasting, autocast, on)
    with kept_generators(), without_gradients(modules), torch.inference_mode(False), torch.enable_grad():
        with computing():
            chain, weights = _captured(model, sample)
        call, _ = read_sample(sample, chain.inputs.microbatch_size)
        values = chain.inputs.bind(call.args, call.kwargs)
        loss = None if loss_fn is None else partial(_loss, chain, loss_fn, target)
        bench = _LayerBench(
            chain, values, clock=clock, meter=meter_of(on), warmup=warmup, computing=computing, loss=loss, codec=codec
        )
        steps = [(run, index) for run in range(1 + warmup + iterations) for index in range(len(chain.layers))]
        for run, index in progress_line(steps, lambda step: chain.layers[step[1]].name, "profiling", progress):
            bench.step(run, index)
        updates = _update_seconds(chain, optimizer, clock) if optimizer is not None else [0.0] * len(chain.layers)
        layers = tuple(bench.result(index, *own) for index, own in enumerate(zip(weights, updates, strict=True)))
    title = name or ("" if isinstance(model, Sequence | LayerChain) else type(model).__name__)
    crossings = tuple(
        replace(found, size_bytes=bench.value_bytes[found.name], wire_bytes=bench.wire_bytes_of(found.name))
        for found in crossings_of(chain)
        # A value that only the next layer reads is never relayed.
        if found.read != (found.made + 1,)
    )
    return Profile(
        layers,
        chain.inputs.microbatch_size,
        name=title,
        device=device_name(on),
        crossings=crossings,
        library_bytes=bench.library_bytes,
        fragmentation=bench.fragmentation,
        tensor_parallel=1 if bench.group is None else bench.group.size(),
        split_share=bench.split_share(),
    )


class _LayerBench:
    """Passes the values of one microbatch through a chain repeatedly, and measures each layer.

    A run goes through all layers before the next run starts, so that a machine that slows down slows all layers down: a
    plan depends on their ratios. Caches are then in the state in which a stage of several layers finds them.
    """

    def __init__(
        self,
        chain: LayerChain,
        inputs: Mapping[str, Tensor],
        *,
        clock: Clock,
        meter: Meter,
        warmup: int,
        computing: Computing,
        loss: Callable[[Mapping[str, Tensor]], Tensor] | None,
        codec: WireCodec | None,
    ) -> None:
        self.chain, self.inputs = chain, inputs
        """`inputs`: the model's, which every rank has."""
        self.clock, self.meter, self.warmup, self.computing, self.codec = clock, meter, warmup, computing, codec
        self.loss = loss
        """Computes the loss from the values of the chain's output; belongs to the last layer."""
        self.values = dict(inputs)
        """The values that the next layers may read. A tensor that autograd flows through requires a gradient."""
        self.saved_bytes, self.cut_bytes = list[int](), list[int]()
        self.value_bytes: dict[str, int] = {}
        """The size of each value that a later layer reads."""
        self.value_wire_bytes: dict[str, int] = {}
        """What links carry of it."""
        self.workspace_bytes: list[float] = []
        self.library_bytes, self.fragmentation = 0.0, 1.0
        self.group = sharing_group(modules_of(chain))
        """The processes that share every layer; None if it is this one alone."""
        self._held_first = meter.held()
        self.pilots: list[list[tuple[float, float]]] = [[] for _ in chain.layers]
        self.calls: list[int] = []
        """By layer, how many calls are timed together."""
        self.samples: list[list[tuple[float, float]]] = [[] for _ in chain.layers]
        self.split_seconds: list[list[tuple[float, float]]] = [[] for _ in chain.layers]
        """By layer: input backwards and weight backwards."""

    def step(self, run: int, index: int) -> None:
        """Layer `index` in run `run`. The first `warmup` runs show how long calls take, the next counts the bytes."""
        if index == 0:
            self.values = dict(self.inputs)
        if run < self.warmup:
            self.pilots[index].append(self._time(index, 1))
        elif run == self.warmup:
            # As many on all processes that share the layer.
            self.calls.append(calls_per_sample(longest(min(forward for forward, _ in self.pilots[index]), self.group)))
            self._survey(index)
        else:
            # Every second time: a weight backward takes a forward and an input backward before it.
            self.samples[index].append(self._time(index, self.calls[index], weighs=(run - self.warmup) % 2 == 1))

    def result(self, index: int, weights: tuple[int, int], update_seconds: float) -> LayerProfile:
        """The results of all runs for layer `index`, whose update takes `update_seconds`. `weights`: the bytes that are
        trained in it, and that are frozen.
        """
        layer, cut = self.chain.layers[index], self.chain.cut(index + 1)
        backward_seconds = median_seconds(backward for _, backward in self.samples[index])
        return LayerProfile(
            name=layer.name,
            forward_seconds=median_seconds(forward for forward, _ in self.samples[index]),
            backward_seconds=backward_seconds,
            cut_bytes=self.cut_bytes[index],
            saved_bytes=self.saved_bytes[index],
            parameter_bytes=weights[0],
            workspace_bytes=self.workspace_bytes[index],
            weight_seconds=min(self._halves(index)[1], backward_seconds),
            wire_bytes=None if self.codec is None else sum(map(self.value_wire_bytes.__getitem__, cut)),
            update_seconds=update_seconds,
            frozen_bytes=weights[1],
        )

    def split_share(self) -> float | None:
        """How much longer the halves of split backwards take than the whole ones, relative to all; None without any."""
        more = whole = 0.0
        for index, samples in enumerate(self.samples):
            seconds = median_seconds(backward for _, backward in samples)
            whole += seconds
            more += sum(self._halves(index)) - seconds if self.split_seconds[index] else 0.0
        return max(0.0, more / whole) if any(self.split_seconds) and whole else None

    def _halves(self, index: int) -> tuple[float, float]:
        """The medians of the input backward and of the weight backward; zeros if the backward was not split."""
        found = self.split_seconds[index] or [(0.0, 0.0)]
        return median_seconds(first for first, _ in found), median_seconds(last for _, last in found)

    def wire_bytes_of(self, value: str) -> int | None:
        """What links carry of `value`; None if it is sent as it is."""
        return None if self.codec is None else self.value_wire_bytes[value]

    def _survey(self, index: int) -> None:
        """Counts the bytes of layer `index`, which has run before: libraries have made what they make once and keep."""
        layer = self.chain.layers[index]
        if index == 0:
            self.library_bytes = float(max(0, self.meter.held() - self._held_first))
        with _explained(index, layer, "forward"):
            saved = measure_saved_bytes(
                lambda: self._call(index, self._arguments(index)),
                lambda: self._call(index, self._arguments(index, copied=True)),
            )
        self.saved_bytes.append(saved)
        with _explained(index, layer, "backward"):
            halves = self._input_backward_bytes(index)
        self.workspace_bytes.append(max(halves, *self._sample(index, 1, self._beyond_rest, self._beyond_start)))
        self.fragmentation = self.meter.fragmentation()
        made = {name: self.values[name] for name in layer.outputs if name in self.values}
        self.value_bytes.update((name, local_bytes(value)) for name, value in made.items())
        self.value_wire_bytes.update(
            (name, sent_bytes(self.codec, value.shape, value.dtype)) for name, value in made.items()
        )
        self.cut_bytes.append(sum(local_bytes(self.values[value]) for value in self.chain.cut(index + 1)))

    def _beyond_rest(self, work: Callable[[], object]) -> float:
        """The most bytes that `work` holds beyond what it leaves behind."""
        return float(self.meter.most(work) - self.meter.held())

    def _beyond_start(self, work: Callable[[], object]) -> float:
        """The most bytes that `work` holds beyond what was there before; 0 if it only frees."""
        before = self.meter.held()
        return float(self.meter.most(work) - before)

    def _input_backward_bytes(self, index: int) -> float:
        """The most bytes that an input backward holds beyond what was there before; 0 if there is none."""
        arguments, results = self._arguments(index), list[_Result]()
        self.meter.most(lambda: results.append(self._call(index, arguments)))
        edges = list(map(get_gradient_edge, results[0].roots))
        gradients = [torch.ones_like(root) for root in results[0].roots]
        return _unless_whole(lambda: self._beyond_start(lambda: run_input_backward(edges, gradients, arguments))) or 0.0

    def _time(self, index: int, calls: int, weighs: bool = False) -> tuple[float, float]:
        return self._sample(index, calls, self.clock.seconds, self.clock.seconds, weighs)

    def _sample(
        self, index: int, calls: int, forward_gauge: Gauge, backward_gauge: Gauge, weighs: bool = False
    ) -> tuple[float, float]:
        """The results of the gauges for one forward and one backward, each the mean over `calls`; then moves on to the
        next layer. `weighs`: also times the weight backward.
        """
        layer = self.chain.layers[index]
        prepared = [self._arguments(index) for _ in range(calls)]
        results: list[_Result] = []

        def forwards() -> None:
            for arguments in prepared:
                results.append(self._call(index, arguments))

        with _explained(index, layer, "forward"):
            forward = forward_gauge(forwards) / calls
        gradients = [torch.ones_like(root) for root in results[0].roots]

        def backwards() -> None:
            for result in results:
                torch.autograd.backward(result.roots, gradients)

        backward = 0.0
        if gradients:
            with _explained(index, layer, "backward"), _accumulating(layer.module):
                backward = backward_gauge(backwards) / calls
                if weighs and any(parameter.requires_grad for parameter in layer.module.parameters()):
                    self._time_halves(index, calls, gradients)
        self._move(index, prepared[-1], results[-1].outputs)
        return forward, backward

    def _time_halves(self, index: int, calls: int, gradients: Sequence[Tensor]) -> None:
        """Times the input backward and the weight backward of the layer."""
        prepared = [self._arguments(index) for _ in range(calls)]
        results = [self._call(index, arguments) for arguments in prepared]
        weight_backwards: list[WeightBackward] = []

        def run_inputs() -> None:
            for arguments, result in zip(prepared, results, strict=True):
                edges = list(map(get_gradient_edge, result.roots))
                weight_backwards.append(run_input_backward(edges, gradients, arguments)[1])

        def run_weights() -> None:
            for weight_backward in weight_backwards:
                weight_backward.run()

        inputs = _unless_whole(lambda: self.clock.seconds(run_inputs))
        if inputs is None:
            return
        self.split_seconds[index].append((inputs / calls, self.clock.seconds(run_weights) / calls))

    def _arguments(self, index: int, copied: bool = False) -> list[Tensor]:
        """Fresh leaves over the values that layer `index` reads, as a stage receives them; or in new storages."""
        layer = self.chain.layers[index]
        leaves: dict[str, Tensor] = {}
        for name in dict.fromkeys(layer.inputs):
            value = self.values[name]
            leaf = value.detach().clone() if copied else value.detach()
            leaves[name] = leaf.requires_grad_(value.requires_grad)
        for name in layer.mutates:
            # A leaf that needs a gradient may not be written in place; a stage clones what it received, too.
            leaves[name] = leaves[name].clone()
        return [leaves[name] for name in layer.inputs]

    def _call(self, index: int, arguments: Sequence[Tensor]) -> "_Result":
        layer = self.chain.layers[index]
        # Left after every call, or autocast would keep the weights that it has cast for the next one.
        with self.computing():
            if layer.random:
                with seeded(0, index, arguments):
                    outputs = tuple(layer.module(*arguments))
            else:
                outputs = tuple(layer.module(*arguments))
            results: Sequence[Tensor] = outputs
            if self.loss is not None and index + 1 == len(self.chain.layers):
                results = [self.loss({**self.values, **dict(zip(layer.outputs, outputs, strict=True))})]
        return _Result(outputs, [result for result in results if result.requires_grad])

    def _move(self, index: int, arguments: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Takes the values past layer `index`, which was called once, and drops what no later layer needs."""
        layer = self.chain.layers[index]
        written = {name: arguments[layer.inputs.index(name)] for name in layer.mutates}
        written.update(zip(layer.outputs, outputs, strict=True))
        kept = {*self.inputs, *self.chain.cut(index + 1)}
        moved = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in written.items()}
        self.values = {name: value for name, value in {**self.values, **moved}.items() if name in kept}


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of one forward: the layer's outputs, and the tensors that its backward starts from."""

    outputs: tuple[Tensor, ...]
    roots: list[Tensor]


def _update_seconds(chain: LayerChain, make: MakeOptimizer, clock: Clock) -> list[float]:
    """What the optimizer that `make` makes takes for each layer, on copies of what the layer trains."""
    found: list[list[float]] = [[] for _ in chain.layers]
    held, size = dict[int, tuple[torch.optim.Optimizer, ...]](), 0
    for index, layer in enumerate(chain.layers):
        named = layer.module.named_parameters(layer.name)
        copies = {name: nn.Parameter(each.detach().clone()) for name, each in named if each.requires_grad}
        for each in copies.values():
            each.grad = torch.zeros_like(each)
        held[index] = make_optimizers(make, copies)
        size += sum(map(local_bytes, copies.values()))
        if size < _UPDATED_BYTES and index + 1 < len(chain.layers):
            continue
        # The first step makes the optimizer's state.
        for turn, (number, optimizers) in product(range(1 + _UPDATES), held.items()):
            with _explained(number, chain.layers[number], "update"):
                seconds = clock.seconds(lambda own=optimizers: [one.step() for one in own]) if optimizers else 0.0  # type: ignore[misc]
            found[number] += [seconds] if turn else []
        held, size = {}, 0
    return list(map(median_seconds, found))


def _loss(chain: LayerChain, loss_fn: LossFunction, target: Any, values: Mapping[str, Tensor]) -> Tensor:
    loss, _ = compute_loss(loss_fn, chain.output.build([values[name] for name in chain.output.values]), target)
    return loss


@contextmanager
def _accumulating(module: nn.Module) -> Iterator[None]:
    """Gives the parameters of `module` gradients to add to, as all microbatches of a minibatch but its first have."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.grad = None


@contextmanager
def without_gradients(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Removes the gradients of the parameters of `modules` inside a ``with`` block. Restores both after it."""
    parameters = list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with KeptParameters(modules).kept():
            yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


@contextmanager
def _explained(index: int, layer: Layer, phase: str) -> Iterator[None]:
    """Turns an error inside a ``with`` block into a `ProfileError` that names the layer."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ProfileError(
            f"layer {index} ({layer.name}) ran out of device memory in its {phase}: a layer must fit the device twice "
            f"with its activations; profile with fewer samples in sample=. {error}"
        ) from error
    except Exception as error:
        raise ProfileError(
            f"layer {index} ({layer.name}) raised {type(error).__name__} in its {phase}: {error}. Expected it to run "
            "on the values that the sample leads to: check that the model trains on the sample by itself"
        ) from error


def _unless_whole(work: Callable[[], float]) -> float | None:
    """What `work` returns, which runs input backwards after whole ones have run; None if autograd cannot split them."""
    try:
        return work()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None


def _captured(model: Model, sample: Sample) -> tuple[LayerChain, list[tuple[int, int]]]:
    """The chain of copies of the layers of `model`, in training mode unless it is a chain; and what each layer holds,
    in bytes, before it was copied: what is trained, and the rest.
    """
    chain, modules = model, modules_of(model)
    evaluated = [] if isinstance(chain, LayerChain) else [module for module in modules if not module.training]
    with in_mode(evaluated, training=True):
        if not isinstance(chain, LayerChain):
            chain = capture(chain, sample)
        copies = Copies(layer.module for layer in chain.layers)
        return chain_of_copies(chain, copies), [held_bytes(layer.module) for layer in chain.layers]
