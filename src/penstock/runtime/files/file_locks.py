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
    """A lock on the file `path`, which names the process that holds it. It ends when nothing refers to it here."""

    def __init__(self, path: Path) -> None:
        self.path, self._descriptor = path, -1
        self.forget()

    def forget(self) -> None:
        """Has a child that was forked close its descriptor: it would keep the lock of a parent that has ended."""
        self.close()
        self.owner = ""
        """What the users of the lock in this process have agreed on, if there are any."""
        self.writing = threading.RLock()
        """For the thread of this process that changes what is beside the file."""

    def take(self) -> bool:
        """Locks the file, which is made where it is missing. False if this process had locked the file at `path`.
        `CheckpointError` if another process holds the lock.
        """
        deadline, new = time.monotonic() + _PATIENCE_SECONDS, False
        while not self._holds():
            new, patient = True, time.monotonic() < deadline
            if not self._attempt(patient):
                time.sleep(_POLL_SECONDS)
            elif not patient:
                # A file system that gives a file other numbers each time.
                break
        return new

    def close(self) -> None:
        """Gives the lock back, if this process has it."""
        if self._descriptor >= 0:
            self._descriptor = -1
            self._close()

    def _attempt(self, patient: bool) -> bool:
        self.close()
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
        # A full disk keeps no process from the lock.
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on host {socket.gethostname()}".encode(), 0)
        return True

    def _holds(self) -> bool:
        """Whether the lock is one on the file at `path`: its directory may have been removed or moved."""
        with suppress(OSError):
            return self._descriptor >= 0 and os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path))
        return False


_LOCKS: "weakref.WeakValueDictionary[Path, FileLock]" = weakref.WeakValueDictionary()


def lock_of(path: Path) -> FileLock:
    """The lock on `path` of this process."""
    return _LOCKS.setdefault(path, FileLock(path))


def _forget() -> None:
    for lock in list(_LOCKS.values()):
        lock.forget()


os.register_at_fork(after_in_child=_forget)
