"""Hints in the log of ``penstock``, one for each slip that is no error: the training runs, but seldom as it was meant.

A hint says what was found, what follows from it, and what to do. Rank 0 writes it, once in the life of a pipeline.
"""

import logging
import sys
import weakref
from collections.abc import Sequence

from torch import nn

from penstock.runtime.engine.engine import Engine
from penstock.scheduling.schedules import Schedule

__all__ = ["DrainReminder", "give_hints"]


def give_hints(model: nn.Module | Sequence[object], schedule: Schedule, rank: int) -> None:
    """Hints at a model in evaluation mode, and says how many updates a step makes."""
    if rank != 0:
        return
    log = logging.getLogger("penstock")
    modules = [model] if isinstance(model, nn.Module) else [layer for layer in model if isinstance(layer, nn.Module)]
    if modules and not any(module.training for module in modules):
        log.warning(
            "the model is in evaluation mode, and its layers will train so: dropout does nothing and BatchNorm uses "
            "its old statistics. Call model.train() before the Pipeline is built, unless you mean it"
        )
    sizes = schedule.guarantees.microbatches_per_update
    if schedule.definition.updates_per_microbatch and schedule.microbatches > min(sizes):
        log.info(
            "updates per step: %d under %s, one for %d microbatch(es); schedules that flush make one per step",
            schedule.microbatches // min(sizes),
            schedule.name,
            min(sizes),
        )


class DrainReminder:
    """Hints, when `pipe` is closed or gone or the process ends, that microbatches of `engine` were never finished."""

    def __init__(self, pipe: object, engine: Engine, rank: int) -> None:
        # No strong reference: what is reminded of must not be kept alive by it.
        self._finalizer = weakref.finalize(pipe, _remind, weakref.ref(engine), rank)

    def remind(self) -> None:
        """Gives the hint now if it is due; not again later."""
        self._finalizer()

    def cancel(self) -> None:
        """Gives no hint any more: the pipeline failed, which has a message of its own."""
        self._finalizer.detach()


def _remind(engine_of: weakref.ref[Engine], rank: int) -> None:
    engine = engine_of()
    # After an error that ended the program, nothing could have been drained.
    if engine is not None and engine.undrained and rank == 0 and getattr(sys, "last_value", None) is None:
        logging.getLogger("penstock").warning(
            "the pipeline ended with microbatches in flight: the backwards and updates of the last step(s) were not "
            "made. Call pipe.drain() after the last step, or use the pipeline in a with block"
        )
