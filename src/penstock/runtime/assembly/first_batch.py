"""Compares the model with itself on the first batch: at once and by microbatch, as it is and as a chain.

That dimension 0 counts samples, that these do not depend on each other, and that a loss is a mean over them is assumed
when a batch is cut. So the model is run in evaluation mode on the first two microbatches at once and on each of them,
and the losses are compared. Of a traced model the chain is compared with it on the second one, in the mode that it
trains in. All is given back afterwards, as after a capture.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from penstock.capturing.module_copies import Copies
from penstock.capturing.sampled_models import chain_of_copies
from penstock.capturing.sequential import is_plain_sequential
from penstock.capturing.work_estimates import estimate_seconds
from penstock.errors import CaptureError
from penstock.runtime.assembly.captured_models import CapturedModel
from penstock.runtime.batches.loss_comparisons import LossRuns, causes_of, join_pair
from penstock.runtime.batches.microbatches import Microbatch, take_slice
from penstock.runtime.engine.call_agreement import CallAgreement
from penstock.runtime.transport.worlds import World
from penstock.scheduling.schedules import Schedule
from penstock.training.recipes import Recipe

Check: TypeAlias = Literal["warn", "strict", "off"]

_CONTEXT = "while they compared the first batch with the model"
_LEFT_OUT = "the first batch is not compared with the model"
_MOST_SECONDS = 5.0
"""A comparison that is estimated to take longer is left out."""


class FirstBatch:
    """The comparison of the first batch of a pipeline that was built with the arguments `given` by name, of which
    `recipe` has those of the training. `reads_target`: whether this process has the last stage.
    """

    def __init__(
        self, given: Mapping[str, Any], captured: CapturedModel, recipe: Recipe, schedule: Schedule, reads_target: bool
    ) -> None:
        self._model: nn.Module | Sequence[Any] = given["model"]
        self._chain, self._device, self._recipe = captured.chain, captured.device, recipe
        self._strict, self._reads_target = given["check"] == "strict", reads_target
        placement = schedule.placement
        self._slices = max(map(len, placement.stages)) if placement.split else 1
        self._skipped = ""
        """Why there can be no comparison."""
        if captured.weightless is not None:
            self._skipped = "its weights were made for parts of it (init_fn=)"
        elif given["parallelize"] is not None or captured.communicates:
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
            raise CaptureError(text)
        if text and world.rank == 0:
            logging.getLogger("penstock").log(level, text)

    def _reason(self, microbatches: Sequence[Microbatch]) -> str:
        """Why this process cannot compare; empty if it can."""
        first, known = microbatches[0], self._chain.inputs.microbatch_size
        whole = self._reads_target or first.target is not None or self._recipe.reads_model_loss
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
        certain, causes = causes_of(runs, plain, joined, whole, parts)
        return logging.ERROR if certain or self._strict else logging.WARNING, (
            f"the loss of the first two microbatches at once is {whole.loss:.9g}, and the mean of their losses, which "
            f"a step minimizes, is {mean:.9g}: {causes}. check='off' leaves out the comparison, check='strict' makes "
            "every difference an error"
        )
