"""A file that one process at a time has locked, so that none destroys what another one writes beside it.

The lock is that of the opened file (``flock``): reading the file anywhere changes nothing. The operating system takes
it from a process that ends, however it ends. A child that is forked has none.
"""

import fcntl
import logging
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

from penstock.errors import CheckpointError

_PATIENCE_SECONDS = 2.0
"""How long a lock is waited for: the job that holds it may be about to end."""
_POLL_SECONDS = 0.1


class FileLock:
    """A lock on the file `path`, which has words on the holder: its process, its host and `what`."""

    def __init__(self, path: Path, what: str = "") -> None:
        self.path, self._what = path, what
        self.writing = threading.RLock()
        """Held by the thread of this process that changes what is beside the file."""
        self._descriptor: int | None = None
        _LOCKS.add(self)

    def take(self) -> bool:
        """Locks the file, which is made where it is missing. False if this process had locked it, and it is still the
        one at `path`. `CheckpointError` if another process holds the lock.
        """
        if self._holds():
            return False
        self.close()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._attempt(patient=time.monotonic() < deadline):
            time.sleep(_POLL_SECONDS)
        # A full disk keeps no process from the lock.
        with suppress(OSError):
            assert self._descriptor is not None, "it was opened"
            os.ftruncate(self._descriptor, 0)
            holder = f"process {os.getpid()} on host {socket.gethostname()}{self._what}"
            os.pwrite(self._descriptor, holder.encode(), 0)
        return True

    def close(self) -> None:
        """Gives the lock back, if this process has it."""
        if self._descriptor is not None:
            self._descriptor = None
            self._close()

    def _attempt(self, patient: bool) -> bool:
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise CheckpointError(f"{self.path}: expected a file of Penstock's or nothing, found another. Remove it")
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(self._descriptor, 200, 0).decode(errors="replace") or "another process"
            self.close()
            if patient:
                return False
            raise CheckpointError(
                f"{self.path.parent}: expected no other job that saves to this directory, found {other}, which holds "
                f"{self.path.name}. End that job, or give this one another directory"
            ) from None
        except OSError as error:
            logging.getLogger("penstock").warning(
                "%s: this file system has no locks (%s), so another job that saves there is not noticed",
                self.path.parent,
                error.strerror,
            )
        # Its directory may have been removed meanwhile.
        return self._holds() or not patient

    def _holds(self) -> bool:
        with suppress(OSError):
            return self._descriptor is not None and os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path))
        return False


_LOCKS: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Has a child that was forked close its descriptors: it would keep the locks of a parent that has ended."""
    for lock in list(_LOCKS):
        lock.close()
        lock.writing = threading.RLock()


os.register_at_fork(after_in_child=_leave_to_parent)
