"""Pre-emption: at SIGTERM or SIGUSR1 all ranks save the same step and leave.

Schedulers send these signals some time before they take the machine away, often to one process only. Every process
leaves with 128 + the number of the signal, as if the signal had ended it, so a scheduler sees a job that was
interrupted, and not one that has ended.

They save at the end of a step, and not at the beginning of the next one. A loader would then have given its next batch
already, which would be lost.
"""

import atexit
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from penstock.runtime.devices.process_hooks import hooks_allowed
from penstock.runtime.transport.stop_agreements import StopAgreement
from penstock.runtime.transport.worlds import World

_BEGUN = "PENSTOCK_FLEET_BEGUN"
"""The file that says that a training has made a step: an executor that shares devices keeps it running until then."""
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_LOG = logging.getLogger("penstock")


class Resumable(Protocol):
    """What is saved, resumed, or goes back: a `Pipeline`."""

    @property
    def steps(self) -> int: ...

    def load(self, directory: str | Path) -> None: ...

    def save(self, directory: str | Path) -> object: ...


class Preemption:
    """Watches for the signals in a `training` of `world`, to save it to `directory`.

    It watches nothing without a directory and where process hooks are forbidden, and no signal for which the process
    has a handler of its own.
    """

    def __init__(self, world: World, training: Resumable, directory: str | Path | None, timeout_seconds: float) -> None:
        self._directory = directory
        self._rank, self._timeout_seconds = world.rank, timeout_seconds
        self._replaced: dict[signal.Signals, Any] = {}
        self._agreement: StopAgreement | None = None
        self._begun = os.environ.get(_BEGUN) if world.rank == 0 else None
        if directory is None:
            return
        self._training, self._watch = training, world.watch
        # Also where no handler is set: another process may have one.
        self._agreement = StopAgreement(world.watch, world.rank, world.processes, training.steps)
        # Python sets handlers in the main thread only.
        if hooks_allowed() and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._replaced[number] = signal.signal(number, self._note)
            # What runs at the exit of the process, such as the wait for a child, must not be kept from ending.
            atexit.register(self._give_back)
            give_back = weakref.WeakMethod(self._give_back)
            os.register_at_fork(after_in_child=lambda: (own := give_back()) and own())

    def after_step(self, check: Callable[[], None]) -> None:
        """Saves and raises ``SystemExit`` if all ranks stop after the present step. `check` raises if another rank has
        failed.
        """
        if self._begun is not None:
            Path(self._begun).touch()
            self._begun = None
        if self._agreement is None or self._directory is None:
            return
        step = self._training.steps
        reason = self._agreement.begin(step, check, self._timeout_seconds)
        if reason:
            where, code = self._training.save(self._directory), 128 + reason
            if self._rank == 0:
                name = signal.Signals(reason).name
                _LOG.warning("%s: all ranks have saved step %d (%s), and leave with %d", name, step, where, code)
            raise SystemExit(code)

    def close(self) -> None:
        """Gives the signals back, except those that others have taken."""
        self._give_back()
        atexit.unregister(self._give_back)
        if self._agreement is not None:
            self._agreement.close()

    def _give_back(self) -> None:
        for number, before in self._replaced.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, before)
        self._replaced.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        # torchrun passes on a signal that a scheduler may have sent to this process as well: a second one changes
        # nothing.
        assert self._agreement is not None, "there is a handler with an agreement only"
        if self._watch is not None and self._watch.failure is not None:
            # No step will end any more. torchrun sends the signal, too, to the ranks beside one that failed.
            self._give_back()
            os.kill(os.getpid(), number)
        self._agreement.ask(number)
