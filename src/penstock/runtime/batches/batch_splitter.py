"""Cuts a user's batch into the microbatches of a step or of an evaluation, and checks it.

A process requires some of the model's inputs, the target, or nothing but shapes. The shapes of the inputs determine the
shapes of all messages, so every process needs them. Values are needed only by processes whose stages read them.
Elsewhere tensors on the meta device are enough.

A model decides itself what it takes, and many take other lengths than that of the sample, so a batch that differs from
the sample is no error. Where the model fails on it, the difference is the likely reason, and the model's own error does
not name it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from penstock.arguments import entries, text_of
from penstock.capturing.chain import LayerChain
from penstock.capturing.model_forms import ModelInputs
from penstock.capturing.samples import flatten
from penstock.errors import PenstockError
from penstock.runtime.batches.microbatches import Microbatch, count_microbatches, even_spans, split, weighed
from penstock.scheduling.schedules import Schedule
from penstock.torch_internals import pytrees as pytree
from penstock.training.losses import Microbatches, Weigh, amounts_of, check_amounts, check_counted_alike
from penstock.training.recipes import Recipe
from penstock.values.plans import Plan, Stage

_AMOUNT = attrgetter("amount")
_KINDS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""What PyTorch's operators raise for arguments that do not fit."""


@dataclass(frozen=True, slots=True)
class RequiredInputs:
    """The inputs and the target that the stages of one process read."""

    stages: tuple[Stage, ...]
    inputs: frozenset[str]
    """The names of the model's inputs whose values are read; the others may be on the meta device."""
    target: bool
    """Whether the last stage is here; elsewhere the target may be None."""

    @property
    def values(self) -> bool:
        """Whether this process reads any values of a batch."""
        return bool(self.inputs) or self.target

    def checked(self, microbatches: tuple[Microbatch, ...]) -> tuple[Microbatch, ...]:
        """Returns `microbatches`. Raises `PenstockError` if a tensor that is read is on the meta device."""
        inputs, target, without = microbatches[0].inputs, microbatches[0].target, set[str]()
        for name in self.inputs:
            if name in inputs and inputs[name].is_meta:
                without.add(name)
        for leaf in () if not self.target else (target,) if isinstance(target, Tensor) else pytree.tree_leaves(target):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                without.add("the target")
        if without:
            raise PenstockError(
                f"{', '.join(sorted(without))}: on the meta device, and the stages of this process read the values. "
                "Pass the batch itself where pipe.required_inputs names inputs or has target=True"
            )
        return microbatches


def held_stages(plan: Plan, schedule: Schedule, ranks: Iterable[int]) -> tuple[Stage, ...]:
    """The stages of `ranks`, which live in one process; each once, in order."""
    held = {index for rank in ranks for index in schedule.stages_of(rank)}
    return tuple(plan.stages[index] for index in sorted(held))


def find_inputs(chain: LayerChain, stages: Iterable[Stage]) -> RequiredInputs:
    """The inputs that `stages`, those of one process, read in the mode that `chain` was captured in."""
    names: set[str] = set()
    target = False
    own = tuple(stages)
    for stage in own:
        names.update(name for layer in chain.layers[stage.start : stage.stop] for name in layer.inputs)
        if stage.stop == len(chain.layers):
            # The model may return an input as it is.
            names.update(chain.output.values)
            target = True
    return RequiredInputs(own, frozenset(names & _given(chain.inputs)), target)


def _given(inputs: ModelInputs) -> set[str]:
    return {name for name in inputs.names if name not in inputs.constants}


@dataclass(slots=True, eq=False)
class BatchSplitter:
    """Cuts batches for a process that requires some of the inputs of `chain`.

    An evaluation has a multiple of `in_step` microbatches, so that as many replicas evaluate equally often. They have
    at most as many samples as the largest microbatch of a step so far, or of the sample if that has more: the memory of
    the training is enough for them.
    """

    chain: LayerChain
    schedule: Schedule
    required: RequiredInputs
    recipe: Recipe
    in_step: int
    allow: Callable[[int], object]
    """Raises `ScheduleError` for a number of microbatches that no step can have."""
    _largest: int = 1
    """The number of samples of the largest microbatch of a step."""

    def for_step(self, inputs: Any, target: Any) -> tuple[Microbatch, ...]:
        """The microbatches of a training step."""
        placement, count = self.schedule.placement, self.schedule.microbatches
        slices = max(map(len, placement.stages)) if placement.split else 1
        if isinstance(inputs, Microbatches):
            count = self._resized(len(entries("Microbatches(inputs=)", inputs.inputs)))
        made = self.required.checked(self._cut(self.chain, inputs, target, count, slices))
        computed = False
        for microbatch in made:
            self._largest = max(self._largest, microbatch.samples)
            for tensor in microbatch.tensors:
                computed |= tensor.requires_grad
        if computed:
            self._check_leaves(inputs, target)
        # Their backwards come after the step, when the user may have written the next batch into the same memory.
        return made if self.schedule.flushes else tuple([self._kept(microbatch) for microbatch in made])

    def _resized(self, count: int) -> int:
        """Returns `count`. Raises `PenstockError` if no step can have that number of microbatches."""
        if not self.schedule.placement.split and count % self.in_step:
            raise PenstockError(
                f"Microbatches holds {count} microbatch(es), which {self.in_step} replicas with shards of the weights "
                "cannot take equally often: pass a multiple of them"
            )
        if count not in (0, self.schedule.microbatches):
            self.allow(count)
        return count

    def _check_leaves(self, inputs: Any, target: Any) -> None:
        """Raises `PenstockError` if something was computed with gradients: the first backward would free its graph."""
        for batch, labels in _as_given(inputs, target):
            parts = [*self.chain.inputs.read(batch).items(), *(("the target", leaf) for leaf in flatten(labels)[0])]
            for name, tensor in parts:
                if isinstance(tensor, Tensor) and not tensor.is_leaf:
                    raise PenstockError(
                        f"{name}: expected values, found the result of a computation with gradients "
                        f"({type(tensor.grad_fn).__name__}), which the backwards of all microbatches would go through. "
                        "Pass it with .detach(), or compute it in the model if it is to be trained"
                    )

    def _kept(self, microbatch: Microbatch) -> Microbatch:
        """`microbatch` with copies of what this process reads of it on the host.

        Autograd does not notice what is written through NumPy, or by another process.
        """
        inputs = {
            name: _copied(tensor) if name in self.required.inputs else tensor
            for name, tensor in microbatch.inputs.items()
        }
        target = microbatch.target
        if self.required.target and isinstance(target, Tensor):
            target = _copied(target)
        elif self.required.target:
            leaves, structure = flatten(target)
            copies = [_copied(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            target = pytree.tree_unflatten(copies, structure)
        return replace(microbatch, inputs=inputs, target=target)

    def for_evaluation(self, inputs: Any, target: Any) -> tuple[Microbatch, ...]:
        """The microbatches of an evaluation, with the weights of their losses."""
        # The trace of the evaluation may hold for other sizes than that of the training.
        chain = self.chain.evaluation()
        if isinstance(inputs, Microbatches):
            if len(inputs.inputs) % self.in_step:
                raise PenstockError(
                    f"Microbatches holds {len(inputs.inputs)} microbatch(es), which {self.in_step} replicas cannot "
                    "evaluate equally often: pass a multiple of them, or one batch"
                )
            count = len(inputs.inputs)
        else:
            count = self._evaluated_together(chain, inputs)
        return find_inputs(chain, self.required.stages).checked(self._cut(chain, inputs, target, count))

    def for_prediction(self, inputs: Any) -> tuple[Microbatch, ...]:
        """The same without targets and weights."""
        if isinstance(inputs, Microbatches):
            raise PenstockError(
                "predict takes one batch, since outputs are joined: call it for each of the Microbatches"
            )
        chain = self.chain.evaluation()
        cut = split(chain.inputs, inputs, None, self._evaluated_together(chain, inputs))
        return find_inputs(chain, self.required.stages).checked(cut)

    def _evaluated_together(self, chain: LayerChain, inputs: Any) -> int:
        largest = max(self._largest, chain.inputs.microbatch_size)
        try:
            chain.inputs.check_samples(largest, chain.inputs.read(inputs))
        except PenstockError:
            # The evaluation of the model may hold for fewer sizes than its training.
            largest = chain.inputs.microbatch_size
        count = count_microbatches(chain.inputs, inputs, largest)
        return count + -count % self.in_step

    def _cut(self, chain: LayerChain, inputs: Any, target: Any, count: int, slices: int = 1) -> tuple[Microbatch, ...]:
        given = _as_given(inputs, target)
        by_model, weigh, made = self.recipe.reads_model_loss, self._weigh, list[Microbatch]()
        if by_model and any(target is not None for _, target in given):
            raise PenstockError(
                "loss_fn=penstock.model_loss takes no target, since the model computes its loss from labels among its "
                "inputs: call step(batch) with the labels in the batch, as in sample="
            )
        for batch, own in given:
            own = _as_target(batch) if by_model and weigh is not None else own
            made += split(chain.inputs, batch, own, count // len(given), slices)
        if weigh is not None or len(given) > 1:
            made = [*weighed(made, weigh)]
        counts = by_model and self.required.target
        if self.recipe.loss_weight is None and (counts or len(given) > 1):
            self._check_unweighed(chain, given, made, slices, counts)
        check_amounts(map(_AMOUNT, made))
        return tuple(made)

    def _check_unweighed(
        self, chain: LayerChain, given: Sequence[tuple[Any, Any]], made: Sequence[Microbatch], slices: int, counts: bool
    ) -> None:
        """Raises `PenstockError` if the samples of `made` may not weigh the same, and no loss_weight says how much.
        `counts`: whether a mean over labels would weigh them.
        """
        tensors = [chain.inputs.read(batch) for batch, _ in given]
        batched = [name for name in tensors[0] if name in chain.inputs.batched]
        shapes = {name: sorted({tuple(each[name].shape[1:]) for each in tensors}) for name in batched}
        if other := {name: found for name, found in shapes.items() if len(found) > 1}:
            over_tokens, over_samples = (
                ("penstock.token_count('labels', shifted=True or False)", "lambda batch: len(batch['labels'])")
                if self.recipe.reads_model_loss
                else ("lambda target: (target != -100).sum()", "lambda target: len(target)")
            )
            raise PenstockError(
                f"the microbatches have different shapes behind the samples, {other}, and no loss_weight= says what "
                f"the loss is a mean over: pass loss_weight={over_tokens} for a mean over tokens, or "
                f"loss_weight={over_samples} for a mean over samples"
            )
        if counts:
            sizes = [len(span) for microbatch in made for span in even_spans(microbatch.samples, slices)]
            check_counted_alike({name: [each[name] for each in tensors] for name in batched}, sizes)

    @property
    def _weigh(self) -> Weigh | None:
        """The weights of targets; None where they are not read, or weigh their samples."""
        if self.recipe.loss_weight is None or not self.required.target:
            return None
        return partial(amounts_of, self.recipe.loss_weight, nonzero=self.recipe.reads_model_loss)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.device.type == "cpu" else tensor


def _as_given(inputs: Any, target: Any) -> list[tuple[Any, Any]]:
    """The batches with their targets: one, or one for each microbatch."""
    if not isinstance(inputs, Microbatches):
        return [(inputs, target)]
    targets = [None] * len(inputs.inputs) if inputs.targets is None else inputs.targets
    targets = entries("Microbatches(targets=)", targets)
    if target is not None or not inputs.inputs or len(targets) != len(inputs.inputs):
        raise PenstockError(
            f"Microbatches holds {len(inputs.inputs)} inputs and {len(targets)} targets"
            f"{', and there is a target beside it' if target is not None else ''}: expected at least one, as many "
            "targets as inputs, and pipe.step(penstock.Microbatches(inputs, targets))"
        )
    return list(zip(inputs.inputs, targets, strict=True))


def _as_target(batch: Any) -> Any:
    """`batch` as what a `loss_weight` is called with if the model computes its loss."""
    return dict(batch) if isinstance(batch, Mapping) else batch


@contextmanager
def explained_mismatches(where: str, inputs: Any, *target: Any, spec: ModelInputs, sample: Any) -> Iterator[None]:
    """Turns an error of its body into a `PenstockError` that names what is different in the batch, if anything is.

    `where`: the method that was called with `inputs` and `target`, which is left out where there is none.
    """
    try:
        yield
    except _KINDS as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        # A loss need not read a target, and one that does fails on a None.
        given = () if target == (None,) and "None" not in str(error) else target
        found = _differences(spec, sample, inputs, given)
        if not found:
            raise
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise PenstockError(f"{where}: {'; '.join(found)}. The model or its loss failed on that: {reason}") from error


def _differences(spec: ModelInputs, sample: Any, inputs: Any, target: Sequence[Any]) -> list[str]:
    given = list(inputs.inputs) if isinstance(inputs, Microbatches) else [inputs]
    known = spec.read(sample)
    batches = [spec.read(batch) for batch in given]
    names = [name for name in known if any(not _alike(known[name], batch[name]) for batch in batches)]
    found = [_described(name, known[name], next(b[name] for b in batches if not _alike(known[name], b[name])))
             for name in names]  # fmt: skip
    leaves = pytree.tree_leaves(target)
    if target and not isinstance(inputs, Microbatches) and not any(isinstance(leaf, Tensor) for leaf in leaves):
        found.append(
            f"target: expected a tensor for every sample, or several in a tuple, list or dict, found "
            f"{text_of(target[0])}: pass the second argument of loss_fn"
        )
    return found


def _alike(known: Tensor, found: Tensor) -> bool:
    """Whether two tensors differ in nothing but their number of samples."""
    return known.dtype == found.dtype and known.ndim == found.ndim and known.shape[1:] == found.shape[1:]


def _described(name: str, known: Tensor, found: Tensor) -> str:
    shapes = [f"({', '.join(['samples', *map(str, tensor.shape[1:])])})" for tensor in (known, found)]
    fix = f"pass it as .to({known.dtype})" if known.dtype != found.dtype else "pass inputs of that shape"
    return (
        f"{name}: expected {known.dtype} of shape {shapes[0]}, as in sample=, found {found.dtype} of shape "
        f"{shapes[1]}: {fix}, or build the pipeline with a sample= of this kind"
    )
