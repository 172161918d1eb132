"""Which job and which run a directory of checkpoints belongs to: one at a time, so that none destroys another's work.

A job locks the directory at its first save, or when it starts with ``resume=``, until its pipelines are closed. The
operating system takes the lock from a process that ends, however it ends; children of it have none. The file of the
lock stays. A run has a random name, which is in all of
its checkpoints; what goes on from a checkpoint has the name of that one.
"""

import fcntl
import logging
import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.common_errors import Ranks
from penstock.runtime.checkpoints.manifests import read_manifest
from penstock.runtime.checkpoints.step_directories import LOCK, check_target, make_directory, steps_in

_PATIENCE_SECONDS = 2.0
"""How long a lock is waited for: the job that holds it may be about to end."""
_POLL_SECONDS = 0.1


class _Lock:
    """A lock on a directory, for as long as a claim of this process refers to it."""

    def __init__(self, directory: Path, run: str) -> None:
        holder = f"process {os.getpid()} on host {socket.gethostname()} with the run {run}"
        weakref.finalize(self, os.close, _acquire(directory / LOCK, holder))


_LOCKS: "weakref.WeakValueDictionary[tuple[int, Path], _Lock]" = weakref.WeakValueDictionary()
"""The locks of each process. Its pipelines share them: what they save differs in the names of their runs."""


class DirectoryClaims:
    """The directories that a pipeline saves to. `run`: the name of its run, the same on all ranks."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._claimed: dict[Path, str] = {}
        """By directory, the name of the run that it belongs to."""
        self._locks: list[_Lock] = []

    def lock(self, directory: Path, ranks: Ranks) -> None:
        """Locks `directory`, which is made where it is missing. Collective. `CheckpointError` on all ranks if another
        job holds the lock.
        """
        ranks.each(lambda: self._lock(directory) if ranks.rank == 0 else None)

    def claim(self, directory: Path, ranks: Ranks) -> str:
        """The name of the run that saves to `directory`, which is locked. Collective. `CheckpointError` on all ranks if
        it has checkpoints of another run.
        """
        path = directory.absolute()
        if path not in self._claimed:
            self.lock(directory, ranks)
            ranks.each(lambda: _check_runs(directory, self.run) if ranks.rank == 0 else None)
            self._claimed[path] = self.run
        return self._claimed[path]

    def close(self) -> None:
        """Gives the locks back."""
        self._claimed.clear()
        self._locks.clear()

    def _lock(self, directory: Path) -> None:
        check_target(directory)
        make_directory(directory)
        own = os.getpid(), directory.resolve()
        lock = _LOCKS.get(own)
        if lock is None:
            _LOCKS[own] = lock = _Lock(own[1], self.run)
        self._locks.append(lock)


def _check_runs(directory: Path, run: str) -> None:
    found = {path: _run_of(path) for _, path in steps_in(directory)}
    # A damaged one may be of this run, which has loaded the one before.
    known = {run, None} if run in found.values() else {run}
    others = [path.name for path, name in found.items() if name not in known]
    if others:
        names = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise CheckpointError(
            f"{directory}: expected checkpoints of this run only, found {names} of another run, which a save could "
            f"replace or remove. To go on with that run, pass resume={str(directory)!r} or load it before. To begin a "
            "new one, save to another directory, or remove those checkpoints first"
        )


def _run_of(path: Path) -> str | None:
    """The name of the run that has saved `path`; None if its manifest is damaged."""
    with suppress(CheckpointError, LookupError, TypeError, AttributeError, OSError):
        return read_manifest(path).run
    return None


def _acquire(path: Path, holder: str) -> int:
    """A descriptor of the locked file `path`, which describes the `holder` in words."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                other = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                os.close(descriptor)
                raise CheckpointError(
                    f"{path.parent}: expected no other job that saves to this directory, found {other}, which holds "
                    f"{path.name}. End that job, or give this one another directory"
                ) from None
            time.sleep(_POLL_SECONDS)
            continue
        except OSError as error:
            logging.getLogger("penstock").warning(
                "%s: this file system has no locks (%s), so another job that saves there is not noticed",
                path.parent,
                error.strerror,
            )
        break
    # A full disk keeps no job from the lock.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
    return descriptor
