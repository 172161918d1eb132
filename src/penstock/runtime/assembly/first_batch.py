"""Compares the model with itself on the first batch: at once and by microbatch, as it is and as a chain.

That dimension 0 counts samples, that these do not depend on each other, and that a loss is a mean over them is assumed
when a batch is cut. So the model is run in evaluation mode on the first two microbatches at once and on each of them,
and the losses are compared. Of a traced model the chain is compared with it on the second one, in the mode that it
trains in. In one process the gradients of the first update are compared with those that the chain has by itself. All
is given back afterwards, as after a capture.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.capturing.model_forms import ModelInputs
from penstock.capturing.module_copies import Copies
from penstock.capturing.operators import OperatorCounter
from penstock.capturing.preservation import KeptObjects, KeptParameters, generator_states, kept_generators, kept_tensors
from penstock.capturing.randomness import microbatch_seed, seed_all
from penstock.capturing.read_names import FunctionModule, modules_read
from penstock.capturing.sampled_models import chain_of_copies
from penstock.capturing.sequential import is_plain_sequential
from penstock.capturing.work_estimates import estimate_seconds
from penstock.errors import CaptureError, PenstockError
from penstock.runtime.assembly.captured_models import CapturedModel
from penstock.runtime.assembly.partial_models import old_numbers
from penstock.runtime.assembly.pipeline_options import PipelineOptions
from penstock.runtime.batches.microbatches import Microbatch, take_slice
from penstock.runtime.batches.results import Loss
from penstock.runtime.engine.call_agreement import CallAgreement
from penstock.runtime.engine.engine import Engine
from penstock.runtime.parameters.model_claims import hint_at_other_optimizers
from penstock.runtime.transport.worlds import World
from penstock.scheduling.schedules import Schedule
from penstock.torch_internals import pytrees as pytree
from penstock.torch_internals.modules import step_hooks
from penstock.torch_internals.tensors import accumulated_hooks, gradient_hooks
from penstock.training.losses import IGNORED, compute_loss
from penstock.training.recipes import Recipe

_Model: TypeAlias = Callable[[Copies, Mapping[str, Tensor]], Any]
"""Takes copies of its modules, and the inputs by name."""
_Gradients: TypeAlias = dict[nn.Parameter, Tensor]
"""Elements of the gradient of each parameter."""
_Batch: TypeAlias = tuple[Mapping[str, Tensor], Any]
"""The inputs by name, and the target."""

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of losses, relative: in a batch of another size sums have another order."""
_ON_ACCELERATORS = 1e-3
"""The least tolerance: kernels for another size may round to TensorFloat-32."""
_LOOKED_AT = 4096
"""Elements of an output whose median is its size, and of a gradient."""
_SEED = 20_011
_CONTEXT = "while they compared the first batch with the model"
_LEFT_OUT = "the first batch is not compared with the model"
_UNSTEADY = (
    f"{_LEFT_OUT}: loss_fn gives another loss for the same output in a second call. State in Python that it changes (a "
    "counter, an iterator) counts the calls of this comparison, too: check='off' leaves it out"
)
_MOST_SECONDS = 5.0
"""A comparison that is estimated to take longer is left out."""


class FirstBatch:
    """The comparison of the first batch of a pipeline of `options`. `reads_target`: whether this process has the last
    stage.
    """

    def __init__(
        self, options: PipelineOptions, captured: CapturedModel, schedule: Schedule, reads_target: bool
    ) -> None:
        self._model = options.model.model
        self._chain, self._device, self._recipe = captured.chain, captured.device, options.recipe
        self._strict, self._reads_target = options.run.check == "strict", reads_target
        placement = schedule.placement
        self._slices = max(map(len, placement.stages)) if placement.split else 1
        recipe, alone = options.recipe, max(map(len, placement.stages)) == 1
        others = (recipe.autocast, recipe.version_dtype, recipe.codec, recipe.clip_grad_norm, options.plan.recompute)
        self._plain = alone and schedule.flushes and not (any(others) or recipe.hooks or schedule.recomputed)
        """Whether gradients at an update are the sums of a plain loop, and take no more memory than a step."""
        self._seed = options.run.seed
        self._skipped = ""
        """Why there can be no comparison."""
        if captured.weightless is not None:
            self._skipped = "its weights were made for parts of it (init_fn=)"
        elif options.run.parallelize is not None or captured.chain.communicates:
            self._skipped = "it needs several processes for a forward"

    def compare(self, microbatches: Sequence[Microbatch], world: World, calls: CallAgreement) -> None:
        """Warns once, or raises `CaptureError` on all ranks. Collective; `calls` are those of this rank."""
        # A rank that refuses the batch says so in its announcement, and does not come to the gather.
        calls.announce("the first step", microbatches, 0, None)
        reasons = world.gather(self._reason(microbatches), _CONTEXT)
        judge = next((rank for rank, reason in enumerate(reasons) if not reason), None)
        level, text = logging.INFO, f"{_LEFT_OUT}: {reasons[0]}"
        if judge is not None:
            verdict = self._verdict(microbatches) if world.rank == judge else (level, "")
            level, text = world.gather(verdict, _CONTEXT)[judge]
        if level >= logging.ERROR:
            # The report of an error must not overtake the verdict on another rank.
            with suppress(PenstockError):
                world.gather("", _CONTEXT)
            raise CaptureError(text)
        if text and world.rank == 0:
            logging.getLogger("penstock").log(level, text)

    def train(
        self,
        microbatches: Sequence[Microbatch],
        world: World,
        engine: Engine,
        optimizers: Sequence[Optimizer],
        *,
        before: Callable[[], object],
    ) -> Loss:
        """Makes the first step, and compares its gradients after it. Raises as `compare`; for gradients if strict.
        `before`: called between the first comparison and the step.
        """
        if world.rank == 0:
            hint_at_other_optimizers(optimizers)
        with old_numbers(self._model):
            self.compare(microbatches, world, engine.calls)
        before()
        expected, found = _Gradients(), _Gradients()
        if self._plain and not self._skipped and world.processes == 1 and not any(map(step_hooks, optimizers)):
            with suppress(Exception):
                expected = self._gradients(microbatches, engine.trained)

        def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            found.update((each, _some(each.grad)) for each in held if each.grad is not None)

        with ExitStack() as hooks:
            for optimizer in optimizers if expected else ():
                try:
                    hooks.callback(optimizer.register_step_pre_hook(note).remove)
                except AttributeError:
                    # Its class does not call super().__init__().
                    expected.clear()
            loss = engine.train(microbatches)
        # Without gradients that are finite there is no update.
        wrong = _different(expected, found) if found else None
        if wrong is not None:
            name = next(name for name, each in self._chain.parameters.items() if each is wrong)
            text = (
                f"the gradient of {name} at the first update is not the sum over the microbatches: expected what "
                "backwards of each leave. Look for code that writes .grad in a forward or a hook (zero_grad()). "
                "penstock.rehearse compares more; check='off' leaves out the comparison"
            )
            if self._strict:
                raise CaptureError(text)
            logging.getLogger("penstock").warning(text)
        return loss

    def _gradients(self, microbatches: Sequence[Microbatch], before: int) -> _Gradients:
        """The gradients of the minibatch; none if two runs differ or would take long. `before`: microbatches before."""
        chain, layers, kept = self._chain, [layer.module for layer in self._chain.layers], []
        samples = sum(each.samples for each in microbatches) / chain.inputs.microbatch_size
        if sum(estimate_seconds(chain, self._device) or ()) * samples > _MOST_SECONDS / 5 and not self._strict:
            return {}
        every = [parameter for parameter in dict.fromkeys(chain.parameters.values()) if parameter.requires_grad]
        trained = [each for each in every if not gradient_hooks(each) and not accumulated_hooks(each)]
        runs = LossRuns(layers, self._recipe, self._device)

        def backwards(copies: Copies, _: Mapping[str, Tensor]) -> Any:
            stage = chain_of_copies(chain, copies).stage(0, len(layers))
            sums = _Gradients((parameter, 0 * _some(parameter)) for parameter in trained)
            with torch.enable_grad():
                for k, each in enumerate(microbatches, before):
                    seed = None if self._seed is None else microbatch_seed(self._seed, k)
                    inputs, target = _copied((each.inputs, each.target))
                    output = chain.output.build(stage((), inputs, seed))
                    loss = compute_loss(copies.of(runs.loss), output, target)[0] * each.weight
                    found = torch.autograd.grad(loss, trained, allow_unused=True)
                    for parameter, own in zip(trained, found, strict=True):
                        sums[parameter] += 0 if own is None else _some(own)
            kept.append(sums)
            return output

        batch = microbatches[-1].inputs, microbatches[-1].target
        steady = not any(runs.run(backwards, batch, evaluates=False).random for _ in range(2))
        return kept[0] if steady and _different(*kept) is None else {}

    def _reason(self, microbatches: Sequence[Microbatch]) -> str:
        """Why this process cannot compare; empty if it can."""
        first, known = microbatches[0], self._chain.inputs.microbatch_size
        # Only where the target is read are its items counted.
        counts = self._recipe.loss_weight is None
        whole = self._reads_target or (counts and (first.target is not None or self._recipe.reads_model_loss))
        seconds = sum(estimate_seconds(self._chain, self._device) or ()) * 2 * first.samples / known
        if self._skipped:
            return self._skipped
        if not whole or any(tensor.is_meta for tensor in first.tensors):
            return "no process has all inputs and the target"
        if seconds > _MOST_SECONDS and not self._strict:
            return f"it would take about {seconds:.0f} s (check='strict' takes them)"
        return ""

    def _verdict(self, microbatches: Sequence[Microbatch]) -> tuple[int, str]:
        """A level of the log and a text, which is empty if nothing is wrong."""
        try:
            return self._compare(list(microbatches[:2]))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            return logging.INFO, f"{_LEFT_OUT}: {reason}"

    def _compare(self, pieces: list[Microbatch]) -> tuple[int, str]:
        spec = self._chain.inputs
        if len(pieces) == 1 and self._slices > 1:
            pieces = [take_slice(spec, pieces[0], index, self._slices) for index in range(2)]
        batches = [(piece.inputs, piece.target) for piece in pieces]
        layers = [layer.module for layer in self._chain.layers]
        own = self._model if isinstance(self._model, nn.Module) else nn.ModuleList(layers)
        traced = own is self._model and not isinstance(own, nn.ModuleList) and not is_plain_sequential(own)

        def chain(copies: Copies, inputs: Mapping[str, Tensor]) -> Any:
            stage = chain_of_copies(self._chain, copies).stage(0, len(layers))
            return self._chain.output.build(stage((), inputs))

        def model(copies: Copies, inputs: Mapping[str, Tensor]) -> Any:
            values = {**spec.constants, **inputs}
            args, kwargs = spec.structure.unflatten([values[name] for name in spec.names])
            return copies.of(own)(*args, **kwargs)

        runs = LossRuns([own, *layers], self._recipe, self._device)
        if traced:
            expected, found = [runs.run(each, batches[-1], evaluates=False) for each in (model, chain)]
            if not runs.agree(expected, found.loss):
                if not runs.repeats_loss(model, batches[-1]):
                    return logging.ERROR, _UNSTEADY
                return logging.ERROR, (
                    f"the captured chain of {type(own).__name__} has a loss of {found.loss:.9g} on a microbatch of the "
                    f"first batch, and the model of {expected.loss:.9g}: expected the same. The capture holds for "
                    "sample= only: look for numbers that the model takes from its tensors (an int that a block "
                    "returns), or state that it keeps outside of its blocks. Move this code into a block, or pass the "
                    "model as a list of layers; check='off' leaves out the comparison"
                )
        if len(pieces) == 1:
            return logging.INFO, ""
        joined = join_pair(spec, *pieces)
        if joined is None:
            return logging.INFO, f"{_LEFT_OUT}: its microbatches were not cut from one batch"
        plain = model if traced else chain
        whole, *parts = [runs.run(plain, batch) for batch in (joined, *batches)]
        if any(run.random for run in (whole, *parts)):
            return logging.INFO, f"{_LEFT_OUT}: model or loss draws random numbers in evaluation mode"
        counted = [(piece.amount, run.loss) for piece, run in zip(pieces, parts, strict=True) if piece.amount]
        mean = sum(amount * loss for amount, loss in counted) / sum(amount for amount, _ in counted)
        if runs.agree(whole, mean):
            return logging.INFO, ""
        if not runs.repeats_loss(plain, joined):
            return logging.ERROR, _UNSTEADY
        certain, causes = causes_of(runs, plain, joined, whole, parts)
        return logging.ERROR if certain or self._strict else logging.WARNING, (
            f"the loss of the first two microbatches at once is {whole.loss:.9g}, and the mean of their losses, which "
            f"a step minimizes, is {mean:.9g}: {causes}. check='off' leaves out the comparison, check='strict' makes "
            "every difference an error"
        )


class _Run(NamedTuple):
    loss: float
    outputs: list[Tensor]
    random: bool
    """Whether it drew random numbers."""


class LossRuns:
    """Runs copies of `modules`, with the loss of `recipe`, and leaves no trace in the modules."""

    def __init__(self, modules: Sequence[nn.Module], recipe: Recipe, device: torch.device) -> None:
        self.loss, self._outside = FunctionModule(recipe.loss_fn), modules_read(recipe.loss_fn)
        self.modules, self.recipe, self._device = [*modules, self.loss, *self._outside], recipe, device
        self._copied, self._parameters = [*modules, self.loss], KeptParameters(self.modules)
        self._objects = KeptObjects(self._copied)
        held = [parameter for module in self.modules for parameter in module.parameters()]
        # It sees parameters that a forward writes, and has compiled code run eagerly.
        self._counter = OperatorCounter(held, self._parameters.save)
        types = {parameter.dtype for parameter in held} | {recipe.autocast}
        least = 0.0 if device.type == "cpu" else _ON_ACCELERATORS
        self._tolerance = max(least, *(value for dtype, value in _TOLERANCES.items() if dtype in types), 1e-9)

    def run(self, model: _Model, batch: _Batch, *, evaluates: bool = True) -> _Run:
        """The loss of `model` on a copy of `batch`, and what it returned; in the present mode if it not `evaluates`."""
        inputs, target = _copied(batch)
        with (
            kept_generators(),
            self._parameters.kept(),
            self._objects.kept(),
            ExitStack() as kept,
            torch.no_grad(),
            self._counter.counting(),
            self.recipe.autocast_context(self._device),
        ):
            # Those that the loss finds in its file have no copies.
            for module in self._outside:
                kept.enter_context(kept_tensors(module))
            copies = Copies(self._copied)
            if evaluates:
                kept.enter_context(self._parameters.evaluating([*map(copies.of, self._copied), *self._outside]))
            seed_all(_SEED)
            before = generator_states()
            output = model(copies, inputs)
            outputs = [leaf.clone() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            loss = float(compute_loss(copies.of(self.loss), output, target)[0])
            return _Run(loss, outputs, generator_states() != before)

    def repeats_loss(self, model: _Model, batch: _Batch) -> bool:
        """Whether two calls of the loss with one output of `model` for `batch` return the same."""
        made: list[Any] = []

        def output(copies: Copies, inputs: Mapping[str, Tensor]) -> Any:
            if not made:
                made.append(model(copies, inputs))
            return pytree.tree_map_only(Tensor, torch.clone, made[0])

        # The first one draws the model's random numbers, too.
        _, first, second = [self.run(output, batch, evaluates=False) for _ in range(3)]
        return self.agree(first, second.loss)

    def agree(self, run: _Run, found: float) -> bool:
        """Whether `found` is the loss of `run` but for rounding, which is relative to the outputs, too."""
        sizes = [0.1 * _size(output) for output in run.outputs if output.is_floating_point() and output.numel()]
        scale = max(abs(run.loss), *(size for size in sizes if math.isfinite(size)), 0.0)
        # The step itself refuses a loss that is not finite.
        return not math.isfinite(run.loss) or abs(run.loss - found) <= self._tolerance * scale

    def joins(self, whole: _Run, parts: Sequence[_Run], dimension: int) -> bool:
        """Whether outputs of `parts`, one after the other along `dimension`, are those of `whole` but for rounding."""
        pairs = []
        for one, *others in zip(whole.outputs, *(part.outputs for part in parts), strict=True):
            with suppress(RuntimeError, IndexError):  # of outputs without that dimension
                pairs.append((one, torch.cat(others, dimension)))
        fitting = [pair for pair in pairs if pair[0].is_floating_point() and pair[0].shape == pair[1].shape]
        near = 10 * self._tolerance
        return bool(fitting) and all(torch.allclose(*pair, rtol=near, atol=near * _size(pair[0])) for pair in fitting)


def join_pair(spec: ModelInputs, first: Microbatch, second: Microbatch) -> _Batch | None:
    """Two microbatches as one; None if they were not cut from one batch."""
    pairs = {name: (tensor, second.inputs[name]) for name, tensor in first.inputs.items()}
    whole = all(one is other for name, (one, other) in pairs.items() if name not in spec.batched)
    if first.target_form is not second.target_form or not whole:
        return None
    inputs = {name: torch.cat(pair) if name in spec.batched else pair[0] for name, pair in pairs.items()}
    return inputs, first.target_form.join((first.target, second.target))


def causes_of(runs: LossRuns, model: _Model, batch: _Batch, whole: _Run, parts: Sequence[_Run]) -> tuple[bool, str]:
    """Whether the cut is wrong for certain, and why the losses of `parts` may have another mean than `whole`, that of
    `batch`.
    """
    if runs.agree(whole, sum(part.loss for part in parts)):
        return False, "loss_fn returns a sum: expected the mean over the samples. Use reduction='mean'"
    alike = runs.joins(whole, parts, 0)
    named = [pair for module in runs.modules for pair in module.named_modules()]
    layouts = [name for name, inner in named if getattr(inner, "batch_first", None) is False]
    time_first = f" ({layouts[0]} has batch_first=False)" if layouts else ""
    # A model that divides by the number of its samples, say, can be cut along dimension 1 as well.
    if (
        not alike
        and _cut_along_1(runs, model, batch, whole)
        and (layouts or not _reversible(runs, model, batch, whole))
    ):
        return True, (
            f"the samples are in dimension 1{time_first}, along which the inputs can be cut, and not in dimension 0. "
            "Pass inputs and targets with the samples in dimension 0"
        )
    over_model = (
        f"the samples may be in another dimension than 0{time_first} or packed into one, or a tensor of them goes "
        "whole to every microbatch, or the model looks at the whole batch; or "
    )
    return False, (
        f"{'' if alike else over_model}the loss may be a mean over other items than samples (labels that are not "
        f"{IGNORED}, tokens, a mask, weights: loss_weight= counts them), or compare samples, or divide sums. "
        "penstock.rehearse names the likely cause (docs/inputs.md)"
    )


def _cut_along_1(runs: LossRuns, model: _Model, batch: _Batch, whole: _Run) -> bool:
    """Whether halves of `batch` along dimension 1 give the outputs of `whole`."""
    lengths = {tensor.shape[1] if tensor.ndim > 1 else 0 for tensor in batch[0].values()}
    half = max(lengths) // 2
    if len(lengths) > 1 or not half:
        return False

    def part(index: int) -> _Batch:
        def cut(tensor: Tensor) -> Tensor:
            return tensor.tensor_split((half,), 1)[index] if tensor.ndim > 1 else tensor

        return pytree.tree_map_only(Tensor, cut, batch)  # type: ignore[no-any-return]  # as it was

    # A model or a loss that cannot be cut so fails.
    with suppress(Exception):
        return runs.joins(whole, [runs.run(model, part(0)), runs.run(model, part(1))], 1)
    return False


def _reversible(runs: LossRuns, model: _Model, batch: _Batch, whole: _Run) -> bool:
    """Whether `batch` in reverse along dimension 0 gives the outputs of `whole` in reverse, as it does for samples."""
    back = pytree.tree_map_only(Tensor, lambda tensor: tensor.flip(0) if tensor.ndim else tensor, batch)
    outputs = [output.flip(0) if output.ndim else output for output in runs.run(model, back).outputs]
    return runs.joins(whole, [_Run(0.0, outputs, random=False)], 0)


def _copied(batch: _Batch) -> tuple[dict[str, Tensor], Any]:
    inputs, target = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (dict(batch[0]), batch[1]))
    return inputs, target


def _some(gradient: Tensor) -> Tensor:
    flat = gradient.detach().to_dense().reshape(-1)
    return flat[:: flat.numel() // _LOOKED_AT + 1].clone()


def _different(expected: _Gradients, found: _Gradients) -> nn.Parameter | None:
    """The first parameter whose gradients differ by more than rounding, beside the largest gradient of all."""
    largest = max((float(own.abs().max()) for own in expected.values() if len(own)), default=0.0)
    for parameter, own in expected.items():
        near = 1e-2 if own.dtype in (torch.float32, torch.float64) else 0.2
        other = found.get(parameter, 0 * own)
        if not torch.allclose(other, own, rtol=near, atol=0.1 * near * largest, equal_nan=True):
            return parameter
    return None


def _size(tensor: Tensor) -> float:
    flat = tensor.detach().reshape(-1)
    return float(flat[:: max(1, flat.numel() // _LOOKED_AT)].abs().float().median())
