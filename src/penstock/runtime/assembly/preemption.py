"""Pre-emption: at SIGTERM or SIGUSR1 all ranks save the same step and leave.

Schedulers send these signals some time before they take the machine away, often to one process only. Every process
leaves with 128 + the number of the signal, as if the signal had ended it, so a scheduler sees a job that was
interrupted, and not one that has ended.
"""

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from penstock.runtime.devices.process_hooks import hooks_allowed
from penstock.runtime.transport.stop_agreements import StopAgreement
from penstock.runtime.transport.worlds import World

__all__ = ["Preemption"]

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_LOG = logging.getLogger("penstock")


class Preemption:
    """Watches for the signals in a pipeline of `world` that has made `steps`; `save` then writes a checkpoint.

    It watches nothing where process hooks are forbidden, and no signal for which the process has a handler of its own.
    """

    def __init__(self, world: World, steps: int, save: Callable[[], object], timeout_seconds: float) -> None:
        self._save, self._rank, self._timeout_seconds = save, world.rank, timeout_seconds
        self._agreement = StopAgreement(world.store, world.rank, world.processes, steps)
        self._replaced: dict[signal.Signals, Any] = {}
        # Python sets handlers in the main thread only.
        if hooks_allowed() and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._replaced[number] = signal.signal(number, self._note)

    def before_step(self, step: int, check: Callable[[], None]) -> None:
        """Saves and raises ``SystemExit`` if all ranks stop before `step`. `check` raises if another one has failed."""
        reason = self._agreement.begin(step, check, self._timeout_seconds)
        if reason:
            where, code = self._save(), 128 + reason
            if self._rank == 0:
                name = signal.Signals(reason).name
                _LOG.warning(
                    "%s: all ranks have saved step %d (%s) and leave with exit code %d", name, step, where, code
                )
            raise SystemExit(code)

    def close(self) -> None:
        """Gives the signals back, unless someone else has taken them."""
        for number, before in self._replaced.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, before)
        self._agreement.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        # torchrun passes on a signal that a scheduler may have sent to this process as well: a second one changes
        # nothing.
        self._agreement.ask(number)
