"""Ctrl-C in the midst of work that must not stop halfway, such as an update of the weights."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from penstock.runtime.devices.process_hooks import hooks_allowed


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
