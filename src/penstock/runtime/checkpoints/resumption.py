"""A training that goes on: from the newest checkpoint of a directory, on the processes that are there.

It also goes back to the newest checkpoint when the loss of a step is not finite, with ``on_nonfinite="rollback"``.

At SIGTERM or SIGUSR1 all ranks save the same step and leave. Schedulers send these signals some time before they take
the machine away, often to one process only. Every process leaves with 128 + the number of the signal, as if the signal
had ended it, so a scheduler sees a job that was interrupted, and not one that has ended. They save at the end of a
step, and not at the beginning of the next one. A loader would then have given its next batch already, which would be
lost.
"""

import atexit
import logging
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol, SupportsFloat

from penstock.errors import CheckpointError, PenstockError
from penstock.runtime.checkpoints.checkpoint_reader import checked_path
from penstock.runtime.checkpoints.directory_claims import DirectoryClaims
from penstock.runtime.collectives.agreements import Ranks
from penstock.runtime.collectives.stop_agreements import StopAgreement
from penstock.runtime.devices.process_hooks import hooks_allowed
from penstock.runtime.files.step_directories import recover, steps_in
from penstock.runtime.transport.worlds import World

MOST_RETURNS = 3
"""How often a training goes back to the same step before it gives up."""
_BEGUN = "PENSTOCK_FLEET_BEGUN"
"""The file that says how many steps a training has made. An executor that shares devices keeps it running until there
is one, and plans with those that are left.
"""
_REPORT_SECONDS = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_LOG = logging.getLogger("penstock")


class Resumable(Protocol):
    """What is saved, resumed, or goes back: a `Pipeline`."""

    @property
    def steps(self) -> int: ...

    def load(self, directory: str | Path) -> None: ...

    def save(self, directory: str | Path) -> object: ...


class Resumption:
    """What `training` does after its steps with the `directory` of checkpoints that it resumes from.

    When the loss of a step is not finite it goes back to the newest checkpoint, which `go_back` loads, unless that is
    None. All ranks read the loss of every step, which is the same number on all of them, so all go back together. The
    batches since the checkpoint do not come again: loaders keep their positions. The training then has the numbers of
    one that has never seen these batches.

    When all ranks are asked to stop it saves and leaves. So do the other trainings of the process with a directory: the
    first one that ends a step saves all. They watch for signals if process hooks are allowed, except for signals for
    which the process has a handler of its own.
    """

    def __init__(
        self,
        training: Resumable,
        directory: str | Path | None,
        world: World,
        timeout_seconds: float,
        go_back: Callable[[str | Path], object] | None,
    ) -> None:
        self.rollbacks = 0
        """How often the training went back."""
        self._returns = -1, 0
        """The step that it went back to last, and how often without another one in between."""
        self._directory: Path | None = None
        self._go_back = go_back
        self._world, self._timeout_seconds = world, timeout_seconds
        self._agreement: StopAgreement | None = None
        self._begun = os.environ.get(_BEGUN) if world.rank == 0 else None
        self._next_report = time.monotonic()
        # A training that nothing else holds ends without the garbage collector.
        self._training: Resumable = weakref.proxy(training)
        if directory is None:
            return
        # The script may change to another directory before a signal comes.
        self._directory = Path(directory).absolute()
        # Also where no handler is set: another process may have one.
        self._agreement = StopAgreement(world.watch, world.rank, world.processes, training.steps)
        _WATCHING.add(self._agreement)
        _TRAININGS[self._directory] = self
        # Python sets handlers in the main thread only.
        if hooks_allowed() and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, _note)
            # Handlers are given back first, so that a signal can end other exit functions, such as a wait for a child.
            atexit.unregister(_give_back)
            atexit.register(_give_back)

    def after_step(self, loss: SupportsFloat, check: Callable[[], None]) -> None:
        """Called after every step with its `loss`, which is waited for if the training may go back. Raises
        ``SystemExit`` if all ranks stop after it. `check` raises if another rank has failed. Collective.

        `PenstockError` on all ranks if the training does not get past a step, or if there is no checkpoint.
        """
        if self._go_back is not None and not math.isfinite(value := float(loss)):
            self._return(value, self._go_back)
        if self._begun is not None and time.monotonic() >= self._next_report:
            # Whole: a reader finds a number at any moment.
            beside = Path(f"{self._begun}.new")
            beside.write_text(str(self._training.steps))
            beside.replace(self._begun)
            self._next_report = time.monotonic() + _REPORT_SECONDS
        if self._agreement is None or self._directory is None:
            return
        step = self._training.steps
        reason = self._agreement.begin(step, check, self._timeout_seconds)
        if reason:
            where, code = self._training.save(self._directory), 128 + reason
            self._save_others()
            if self._world.rank == 0:
                name = signal.Signals(reason).name
                _LOG.warning("%s: all ranks have saved step %d (%s), and leave with %d", name, step, where, code)
            raise SystemExit(code)

    def _save_others(self) -> None:
        """Saves the other trainings that all ranks have. Collective."""
        others = {str(directory): each for directory, each in list(_TRAININGS.items()) if directory != self._directory}
        for directory in sorted(set.intersection(*map(set, self._world.gather(list(others))))):
            try:
                others[directory]._training.save(directory)
            except PenstockError as error:
                _LOG.warning("%s: another training of this process could not be saved: %s", directory, error)

    def _return(self, loss: float, go_back: Callable[[str | Path], object]) -> None:
        failed, (step, returns), directory = self._training.steps, self._returns, self._directory
        assert directory is not None, "a training goes back to what it resumes from"
        where = f"the loss of step {failed - 1} (counted from 0) is {loss}"
        if returns == MOST_RETURNS:
            raise PenstockError(
                f"{where}: expected that the training gets past it with other batches, found such a loss after "
                f"{MOST_RETURNS} returns to step {step} in {directory}. Lower the learning rate, clip gradients "
                "(clip_grad_norm=), or load an older checkpoint"
            )
        try:
            go_back(directory)
        except CheckpointError as error:
            raise PenstockError(
                f"{where}: on_nonfinite='rollback' expected a checkpoint of this training in {directory} to go back "
                f"to, found none: {error}. Save one there before, or pass on_nonfinite='skip'"
            ) from error
        now = self._training.steps
        self._returns = now, (returns + 1 if now == step else 1)
        self.rollbacks += 1
        if self._world.rank == 0:
            _LOG.warning(
                "%s: went back from step %d to step %d in %s; the batches since then are skipped",
                where,
                failed,
                now,
                directory,
            )

    def close(self) -> None:
        """Watches no more. What it was asked goes to others that watch; the last one gives the signals back."""
        if self._agreement is not None and self._directory is not None:
            self._agreement.close()
            _WATCHING.discard(self._agreement)
            if _TRAININGS.get(self._directory) is self:
                del _TRAININGS[self._directory]
            for each in list(_WATCHING) if self._agreement.asked else ():
                each.ask(self._agreement.asked)
        if not _WATCHING:
            _give_back()


_WATCHING: "weakref.WeakSet[StopAgreement]" = weakref.WeakSet()
"""What a signal to this process asks."""
_TRAININGS: "weakref.WeakValueDictionary[Path, Resumption]" = weakref.WeakValueDictionary()
"""By directory, the one that was built last."""


@contextmanager
def signals_held() -> Iterator[None]:
    """A block in which a training takes the place of another one, and gets the signals that came meanwhile."""
    held = StopAgreement(None, rank=0, ranks=1, steps=0)
    _WATCHING.add(held)
    try:
        yield
    finally:
        _WATCHING.discard(held)
        if held.asked:
            signal.raise_signal(held.asked)


def _note(number: int, frame: FrameType | None) -> None:
    # torchrun passes on a signal that a scheduler may have sent to this process as well: a second one changes nothing.
    # It sends the signal, too, to the ranks beside one that failed.
    asked = [each.ask(number) for each in list(_WATCHING)]
    if not asked or not all(asked):
        _give_back()
        os.kill(os.getpid(), number)


def _give_back() -> None:
    """Gives the signals back, except those that others have taken."""
    for number in _SIGNALS if threading.current_thread() is threading.main_thread() else ():
        if signal.getsignal(number) is _note:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_give_back)


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
        return Resumption(training, None, world, timeout_seconds, None)

    ranks = Ranks(world.rank, world.gather)
    if claims is not None:
        run = ranks.each(lambda: checked_path(directory))
        # The job that holds it may save its last step until it ends.
        with claims.hold(run, ranks):
            # A damaged checkpoint counts: a training that begins anew would throw away what it holds.
            if any(ranks.together(lambda: bool(steps_in(run)))):
                ranks.alone(lambda: _tidy(run))
                training.load(directory)
                if world.rank == 0:
                    _LOG.warning("%s: the training goes on after step %d", directory, training.steps)
            claims.claim(run, ranks)
    return Resumption(training, directory, world, timeout_seconds, go_back)


def _tidy(run: Path) -> None:
    """Removes what a kill has left in `run`, which no later save would remove if the training saves no more."""
    try:
        recover(run)
    except OSError as error:
        _LOG.warning("%s: what a save has left could not be removed: %s", run, error)
