"""Which job and which run a directory of checkpoints belongs to: one at a time, so that none destroys another's work.

A job locks the directory at its first save, or when it starts with ``resume=``, until its pipelines are closed. A save
that finds another directory in its place locks that one. The pipelines of a process share the lock, and their threads
change the directory one after the other. A run has a random name, which is in all of its checkpoints; what goes on from
a checkpoint has the name of that one.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.manifests import read_manifest
from penstock.runtime.collectives.agreements import Ranks
from penstock.runtime.files.file_locks import FileLock, lock_of
from penstock.runtime.files.step_directories import LOCK, check_target, make_directory, steps_in


class DirectoryClaims:
    """The directories that a pipeline saves to. `run`: the name of its run, the same on all ranks."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._runs: dict[Path, str] = {}
        """By directory, the name of the run that it belongs to."""
        self._locks: dict[Path, FileLock] = {}

    def claim(self, directory: Path, ranks: Ranks) -> str:
        """The name of the run that saves to `directory`, which is locked. Collective. `CheckpointError` on all ranks if
        another job holds the lock, or if it has checkpoints of another run.
        """
        path = directory.absolute()
        if path not in self._runs:
            with self.hold(directory, ranks):
                ranks.alone(lambda: self._own(directory))
            self._runs[path] = self.run
        return self._runs[path]

    @contextmanager
    def hold(self, directory: Path, ranks: Ranks) -> Iterator[None]:
        """A block in which no other job and no other thread changes `directory`, which is made where it is missing.
        Collective. `CheckpointError` on all ranks if another job holds its lock. An error in the block gives back a
        lock that was taken for it.
        """
        with ExitStack() as stack:
            ranks.alone(lambda: stack.enter_context(self._held(directory)))
            yield

    def take_over(self, other: "DirectoryClaims") -> None:
        """Claims what `other` does, in its place."""
        self.run, self._runs, self._locks = other.run, other._runs, other._locks

    def close(self) -> None:
        """Gives the locks back, unless another pipeline of this process has them, too."""
        self._runs, self._locks = {}, {}

    def _own(self, directory: Path) -> None:
        _check_runs(directory, self.run)
        if self._locks[directory.resolve()].owner not in ("", self.run):
            raise CheckpointError(
                f"{directory}: expected a directory of one run, found another one in this process that saves there. "
                "Give this one another directory, or close the other pipeline before"
            )
        self._locks[directory.resolve()].owner = self.run

    @contextmanager
    def _held(self, directory: Path) -> Iterator[None]:
        check_target(directory)
        make_directory(directory)
        place, new = directory.resolve(), False
        known = place in self._locks
        # An error that someone keeps must not keep the lock, so no variable refers to it.
        self._locks[place] = lock_of(place / LOCK)
        with self._locks[place].writing:
            try:
                new = self._locks[place].take()
                if new and (run := self._runs.get(directory.absolute())):
                    logging.getLogger("penstock").warning(
                        "%s was removed or moved since the last save: expected the directory that this job has "
                        "locked, found another one, which is locked from now on",
                        directory,
                    )
                    _check_runs(directory, run)
                yield
            except BaseException:
                if new:
                    self._locks[place].close()
                if not known:
                    del self._locks[place]
                raise


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
