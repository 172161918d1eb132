"""Whether Penstock may change what belongs to the whole process, the one switch that forbids it, and held interrupts.

docs/semantics.md lists these changes.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

PROCESS_HOOKS = "PENSTOCK_PROCESS_HOOKS"
"""The environment variable that, if it is 0, leaves the process to its owner: no hook at an uncaught error or at the
exit, no environment variables, no process group."""


def hooks_allowed() -> bool:
    """Whether the process may be changed."""
    return os.environ.get(PROCESS_HOOKS, "1") != "0"


class HeldInterrupts:
    """Context manager. A SIGINT after a call of `hold` in it has its effect at its end; a second one has it at once."""

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._noted = False

    def hold(self) -> None:
        """Holds interrupts from now on, in the main thread: Python runs handlers in no other."""
        if self._handler is None and hooks_allowed() and threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def __enter__(self) -> None:
        self._noted = False

    def __exit__(self, *_: object) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            if self._noted:
                handler(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True
        signal.signal(number, self._handler)
