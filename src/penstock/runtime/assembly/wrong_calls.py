"""Answers to calls that would not do what their user means: errors with what to call instead, and hints in the log.

A hint is for a slip that is no error: the training runs, but seldom as it was meant. It says what was found, what
follows from it, and what to do. Rank 0 writes it, once in the life of a pipeline.
"""

import logging
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.runtime.engine.engine import Engine
from penstock.runtime.parameters.model_claims import ModelClaim
from penstock.scheduling.schedules import Schedule

_CALLS = {
    "backward": "step(x, y) computes the gradients and makes the update",
    "zero_grad": "step(x, y) begins with no gradients",
    "train": "step(x, y) trains; call model.train() before the pipeline is built",
    "eval": "evaluate(x, y) and predict(x) run the model in evaluation mode",
    "forward": "step(x, y) trains, predict(x) returns outputs, and evaluate(x, y) returns the loss",
    "generate": "load what save_weights(directory) wrote into a whole model, and call its generate",
}


class Advised:
    """A base of `Pipeline`, which says what to call in place of what it has not."""

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        raise PenstockError(f"a {type(self).__name__} is not called: {_CALLS['forward']}")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            advice = f": {_CALLS[name]}" if name in _CALLS else ""
            text = f"{type(self).__name__!r} object has no attribute {name!r}{advice}"
            raise AttributeError(text, name=name, obj=self)


class StepConditions:
    """The conditions for steps of a pipeline on `modules`. `trains`: whether any process trains a parameter."""

    def __init__(self, modules: Sequence[nn.Module], trains: bool) -> None:
        self._claim = ModelClaim(modules)
        self._trains, self._averaged = trains, False

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context manager in which the parameters hold averages."""
        self._averaged = True
        try:
            yield
        finally:
            self._averaged = False

    def check(self) -> None:
        """Raises `PenstockError` if a step would train nothing, or other weights than those of this pipeline."""
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            mode = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
            raise PenstockError(
                f"step() was called under {mode}: expected gradients to be enabled, since the step would train "
                "nothing. Call step() outside of that block, or evaluate() or predict() for a result without training"
            )
        if not self._trains:
            raise PenstockError(
                "step() would train nothing: expected an optimizer with at least one parameter that requires a "
                "gradient on some rank, found none. Unfreeze parameters before the pipeline is built, or return an "
                "optimizer over them; evaluate() and predict() need none"
            )
        self.check_weights("step")
        self._claim.check()

    def check_weights(self, call: str) -> None:
        """Raises `PenstockError` if the parameters hold averages, with which `call` would train, save or be undone."""
        if self._averaged:
            raise PenstockError(
                f"{call}() was called inside of averaged(): expected evaluations, predictions, state dicts and "
                f"save_weights() only, since the parameters hold averages there. Call {call}() after the block"
            )


def give_hints(modules: Sequence[nn.Module], schedule: Schedule, rank: int) -> None:
    """Hints at a model whose `modules` are in evaluation mode, and at steps of several updates."""
    if rank != 0:
        return
    log = logging.getLogger("penstock")
    if modules and not any(module.training for module in modules):
        log.warning(
            "the model is in evaluation mode, and its layers will train so: dropout does nothing and BatchNorm uses "
            "its old statistics. Call model.train() before the Pipeline is built, unless you mean it"
        )
    sizes = schedule.guarantees.microbatches_per_update
    if schedule.definition.updates_per_microbatch and schedule.microbatches > min(sizes):
        log.warning(
            "updates per step: %d under %s, one for %d microbatch(es), so learning rates and schedulers count more of "
            "them than steps. Give microbatches=1, or choose a schedule that flushes, for one update per step",
            schedule.microbatches // min(sizes),
            schedule.name,
            min(sizes),
        )


def remind_to_drain(pipe: object, engine: Engine, rank: int) -> "weakref.finalize[..., object]":
    """Hints, when `pipe` is gone or the process ends, that microbatches of `engine` were never finished. A call of what
    it returns does so now, and `detach` not at all.
    """
    # No strong reference: what is reminded of must not be kept alive by it.
    return weakref.finalize(pipe, _remind, weakref.ref(engine), rank)


def _remind(engine_of: weakref.ref[Engine], rank: int) -> None:
    engine = engine_of()
    # After an error that ended the program, nothing could have been drained.
    if engine is not None and engine.undrained and rank == 0 and getattr(sys, "last_value", None) is None:
        logging.getLogger("penstock").warning(
            "the pipeline ended with microbatches in flight: the backwards and updates of the last step(s) were not "
            "made. Call pipe.drain() after the last step, or use the pipeline in a with block"
        )
