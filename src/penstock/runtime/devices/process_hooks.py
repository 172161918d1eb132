"""Whether Penstock may change what belongs to the whole process, the one switch that forbids it, and held interrupts.

docs/semantics.md lists these changes.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

PROCESS_HOOKS = "PENSTOCK_PROCESS_HOOKS"
"""The environment variable that, if it is 0, leaves the process to its owner: no hook at an uncaught error or at the
exit, no environment variables, no process group."""


def hooks_allowed() -> bool:
    """Whether the process may be changed."""
    return os.environ.get(PROCESS_HOOKS, "1") != "0"


@contextmanager
def held_interrupts() -> Iterator[Callable[[], object]]:
    """Context manager that gives a function. A SIGINT after the call of it has its effect at the end of the block; a
    second one has it at once.
    """
    handler, noted = signal.getsignal(signal.SIGINT), list[int]()

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.signal(number, handler)

    def hold() -> None:
        # Python runs handlers in the main thread only.
        if callable(handler) and hooks_allowed() and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, note)

    try:
        yield hold
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, handler)
        if noted and callable(handler):
            handler(noted[0], None)
