"""A training that goes on: from the newest checkpoint of a directory, on the processes that are there.

It also goes back to the newest checkpoint when the loss of a step is not finite, with ``on_nonfinite="rollback"``. All
ranks read the loss of every step, which is the same number on all of them, so all go back together. The batches since
the checkpoint do not come again: loaders keep their positions. The training then has the numbers of one that has never
seen these batches.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import SupportsFloat

from penstock.errors import CheckpointError, PenstockError, PlanError
from penstock.runtime.checkpoints.agreement import Ranks
from penstock.runtime.checkpoints.checkpoint_reader import checked_path
from penstock.runtime.checkpoints.directory_claims import DirectoryClaims
from penstock.runtime.checkpoints.preemption import Preemption, Resumable
from penstock.runtime.checkpoints.step_directories import check_target, recover, steps_in
from penstock.runtime.transport.worlds import World
from penstock.values.plans import Plan

MOST_RETURNS = 3
"""How often a training goes back to the same step before it gives up."""


def plan_for(plan: Plan | str | Callable[[int], Plan] | None, world: World) -> Plan | str | None:
    """`plan`, or what it returns for the processes of `world` if it is a function.

    `PlanError` if it returns something else than a plan.
    """
    if not callable(plan):
        return plan
    made = plan(world.processes)
    if not isinstance(made, Plan):
        raise PlanError(
            f"plan= is a function: expected that it returns a penstock.Plan for {world.processes} process(es), found "
            f'{made!r:.100}. Return one, or pass plan="auto" or no plan'
        )
    return made


class Resumption:
    """What a training does after its steps with the directory of checkpoints that it resumes from: it goes back to the
    newest one (`rollbacks`, if it was asked to), or saves and leaves (`preemption`).
    """

    def __init__(self, preemption: Preemption, rollbacks: "Rollbacks | None") -> None:
        self._preemption, self._rollbacks = preemption, rollbacks
        self.close = preemption.close

    @property
    def rollbacks(self) -> int:
        """How often the training went back."""
        return 0 if self._rollbacks is None else self._rollbacks.count

    def after_step(self, loss: SupportsFloat, check: Callable[[], None]) -> None:
        """Called after every step with its `loss`. `check` raises if another rank has failed."""
        if self._rollbacks is not None:
            self._rollbacks.after_step(loss)
        self._preemption.after_step(check)


def resume_training(
    training: Resumable,
    directory: str | Path | None,
    world: World,
    timeout_seconds: float,
    go_back: Callable[[str | Path], object] | None,
    *,
    claims: DirectoryClaims | None,
) -> Resumption:
    """Loads the newest checkpoint in `directory` if there is one, and watches for signals to save there and leave.

    Does nothing without a directory. `go_back`: loads the newest one after a loss that is not finite; None if it is not
    to. `claims`: those of the training; None if it goes on without a load. Collective. `CheckpointError` if `directory`
    cannot take checkpoints, belongs to another job, or has checkpoints and none of them is whole and of this training.
    """
    if directory is None:
        return Resumption(Preemption(world, training, None, timeout_seconds), None)

    def look() -> bool:
        # A damaged checkpoint counts: a training that begins anew would throw away what it holds.
        run = checked_path(directory)
        check_target(run)
        return bool(steps_in(run))

    ranks = Ranks(world.rank, world.gather)
    if claims is not None:
        found = any(ranks.together(look))
        run = checked_path(directory)
        claims.lock(run, ranks)
        if found:
            ranks.alone(lambda: _tidy(run))
            training.load(directory)
        claims.claim(run, ranks)
    preemption = Preemption(world, training, directory, timeout_seconds)
    if go_back is None:
        return Resumption(preemption, None)
    return Resumption(preemption, Rollbacks(training, directory, world.rank, partial(go_back, directory)))


def _tidy(run: Path) -> None:
    """Removes what a kill has left in `run`: after the last save of a training no other one does."""
    try:
        recover(run)
    except OSError as error:
        logging.getLogger("penstock").warning("%s: what a save has left could not be removed: %s", run, error)


class Rollbacks:
    """Has `training` go back to the newest checkpoint in `directory`, which `go_back` loads, when the loss of a step is
    not finite: ``on_nonfinite="rollback"``. `rank`: this process's.

    All ranks read the loss of every step, which is the same number on all of them, so all go back together. The batches
    since the checkpoint do not come again: loaders keep their positions. The training then has the numbers of one that
    has never seen these batches.
    """

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
