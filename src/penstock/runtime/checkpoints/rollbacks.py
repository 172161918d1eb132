"""Goes back to the newest checkpoint when the loss of a step is not finite: ``on_nonfinite="rollback"``.

All ranks read the loss of every step, which is the same number on all of them, so all go back together. The batches
since the checkpoint do not come again: loaders keep their positions. The training then has the numbers of one that has
never seen these batches.
"""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import SupportsFloat

from penstock.errors import CheckpointError, PenstockError
from penstock.runtime.checkpoints.preemption import Resumable

MOST_RETURNS = 3
"""How often a training goes back to the same step before it gives up."""


class Rollbacks:
    """Has `training` go back to the newest checkpoint in `directory`, which `go_back` loads. `rank`: this process's."""

    def __init__(self, training: Resumable, directory: str | Path, rank: int, go_back: Callable[[], object]) -> None:
        self.count = 0
        """How often the training went back."""
        self._training, self._directory, self._rank, self._go_back = training, directory, rank, go_back
        self._returns = -1, 0
        """The step that it went back to last, and how often without another one in between."""

    def after_step(self, loss: SupportsFloat) -> None:
        """Goes back if `loss`, that of the last step, is not finite. Waits for it. Collective.

        `PenstockError` on all ranks if the training does not get past a step, or if there is no checkpoint.
        """
        if math.isfinite(value := float(loss)):
            return
        failed, (step, returns) = self._training.steps, self._returns
        where = f"the loss of step {failed - 1} (counted from 0) is {value}"
        if returns == MOST_RETURNS:
            raise PenstockError(
                f"{where}: expected that the training gets past it with other batches, found such a loss after "
                f"{MOST_RETURNS} returns to step {step} in {self._directory}. Lower the learning rate, clip gradients "
                "(clip_grad_norm=), or load an older checkpoint"
            )
        try:
            self._go_back()
        except CheckpointError as error:
            raise PenstockError(
                f"{where}: on_nonfinite='rollback' expected a checkpoint of this training in {self._directory} to go "
                f"back to, found none: {error}. Save one there before, or pass on_nonfinite='skip'"
            ) from error
        now = self._training.steps
        self._returns = now, (returns + 1 if now == step else 1)
        self.count += 1
        if self._rank == 0:
            logging.getLogger("penstock").warning(
                "%s: went back from step %d to step %d in %s, and leave out the batches since",
                where,
                failed,
                now,
                self._directory,
            )
