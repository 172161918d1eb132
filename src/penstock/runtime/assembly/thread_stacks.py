"""The Python stacks of this process: of all threads for a record, and at SIGUSR2 in a file.

`faulthandler` writes both, in C. At the signal its handler does so at once, even if a library holds the interpreter's
lock; Python's own handlers would run only when the main thread executes Python again. For a record it does so while all
threads stand still. Walking the frame objects of a thread that runs crashes Python 3.11 now and then (segmentation
fault in `frame.f_back`).
"""

import faulthandler
import linecache
import os
import re
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from penstock.doctor.records import Frame, ThreadRecord
from penstock.doctor.run_directories import catches
from penstock.runtime.devices.process_hooks import hooks_allowed

_FRAMES = 40
_LIBRARIES = (str(Path(__file__).parents[2]), str(Path(os.__file__).parent), "<frozen")
"""Where files lie that are not the user's own. Installed packages lie below the second."""
_THREAD = re.compile(r"(?:Thread|Current thread) (0x[0-9a-f]+) .*")
_CALL = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


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
        ThreadRecord(names.get(ident, f"thread {ident}"), ident == training, frames)
        for ident, frames in _read_stacks(_written_stacks()).items()
        if ident != threading.get_ident()
    )


def _written_stacks() -> str:
    """The stacks of all threads as `faulthandler` writes them."""
    in_memory = sys.platform == "linux"
    with os.fdopen(os.memfd_create("stacks"), "w+b") if in_memory else tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def _read_stacks(text: str) -> dict[int, tuple[Frame, ...]]:
    """The frames of each thread, by its identifier, outermost call first: at most the last `_FRAMES` calls."""
    stacks: dict[int, list[Frame]] = {}
    for line in text.splitlines():
        if thread := _THREAD.fullmatch(line):
            calls = stacks.setdefault(int(thread[1], 16), [])
        elif (call := _CALL.fullmatch(line)) and len(calls) < _FRAMES:
            file, number = call[1], int(call[2]) if call[2].isdigit() else 0
            code = linecache.getline(file, number).strip()
            calls.append(Frame(file, number, call[3], code, file.startswith(_LIBRARIES)))
    return {ident: tuple(reversed(calls)) for ident, calls in stacks.items()}


def _is_free() -> bool:
    if not hooks_allowed() or sys.platform == "win32" or signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        return False
    # Python does not know of handlers that were set in C.
    return not catches(os.getpid(), signal.SIGUSR2)
