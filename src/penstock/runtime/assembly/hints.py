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
