"""The Python stacks of this process: of all threads for a record, and at SIGUSR2 in a file.

At the signal the handler of `faulthandler` writes them at once, in C, even if a library holds the interpreter's lock.
Python's own handlers would run only when the main thread executes Python again.
"""

import faulthandler
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType

from penstock.doctor.records import Frame, ThreadRecord
from penstock.doctor.run_directories import catches
from penstock.runtime.devices.process_hooks import hooks_allowed
from penstock.torch_internals.interpreter import frames_of_threads

__all__ = ["SignalStacks", "stacks_of_threads"]

_FRAMES = 40
_LIBRARIES = (str(Path(__file__).parents[2]), str(Path(os.__file__).parent), "<frozen")
"""Where files lie that are not the user's own. Installed packages lie below the second."""


class SignalStacks:
    """Makes SIGUSR2 write all stacks to the file `path`, unless the signal has a handler or the process may not be
    changed.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8") if _is_free() else None
        if self._file is not None:
            faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=True, chain=False)

    def size(self) -> int:
        """The size of the file, which grows at every signal."""
        return 0 if self._file is None else os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Gives the signal back. A handler that the user has set since then stays."""
        if self._file is not None:
            if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
                faulthandler.unregister(signal.SIGUSR2)
            with suppress(OSError):
                self._file.close()
            self._file = None


def stacks_of_threads(training: int) -> tuple[ThreadRecord, ...]:
    """The stacks of all threads but the present one. `training`: the identifier of the thread that called the pipeline
    last.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return tuple(
        ThreadRecord(names.get(ident, f"thread {ident}"), ident == training, _frames(frame))
        for ident, frame in frames_of_threads().items()
        if ident != threading.get_ident()
    )


def _is_free() -> bool:
    if not hooks_allowed() or sys.platform == "win32" or signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        return False
    # Python does not know of handlers that were set in C.
    return not catches(os.getpid(), signal.SIGUSR2)


def _frames(frame: FrameType) -> tuple[Frame, ...]:
    stack = traceback.extract_stack(frame)[-_FRAMES:]
    return tuple(
        Frame(one.filename, one.lineno or 0, one.name, one.line or "", one.filename.startswith(_LIBRARIES))
        for one in stack
    )
