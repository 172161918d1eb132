"""Saves that go on beside the training: `Pipeline.save` with ``wait=False``.

The state of each stage is copied to host memory while the next step computes, and a thread writes the copies. At most
one save is under way: the next one waits for it.
"""

import atexit
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.stage_states import StageStates
from penstock.runtime.devices.process_hooks import hooks_allowed
from penstock.runtime.engine.snapshots import Snapshot
from penstock.runtime.transport.store_gathers import PatientGather

Count: TypeAlias = int | None
Place: TypeAlias = str | Path
"""A directory."""
Write: TypeAlias = Callable[[Callable[[], Mapping[str, Any]]], Path]
"""Writes what a function returns, the state of this process. Returns where the checkpoint is. Called in a thread."""


class BackgroundSave:
    """A save that was begun with ``pipe.save(..., wait=False)``."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._result: Future[Path] = Future()
        self._stalled: Callable[[], float] = lambda: 0.0

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not. Does not wait."""
        return self._result.done()

    @property
    def stalled_seconds(self) -> float:
        """How long the training of this process has stood still for this save so far, in seconds."""
        return self._stalled()

    def wait(self) -> Path:
        """Waits until the checkpoint is whole, and returns its directory. Collective.

        Under a schedule without a flush some stages may need more steps until their state can be saved; then it drains
        instead. Raises `CheckpointError` if the checkpoint could not be written; the training can go on.
        """
        if not self.done:
            self._finish()
        return self._result.result()


class BackgroundSaves:
    """The saves of a pipeline that do not stop its training."""

    def __init__(self, states: StageStates, drain: Callable[[], None]) -> None:
        self._states, self._engine, self.drain = states, states.training.engine, drain
        self._copier = self._engine.snapshots.copier
        self._present: BackgroundSave | None = None
        self._gather: PatientGather | None = None

    def prepare(self) -> None:
        """Waits for the save before, and drains where the state without what is in flight would not be enough to go on
        from. Collective.
        """
        self._began = time.perf_counter()
        if self._present is not None and not self._engine.snapshot_reached:
            logging.getLogger("penstock").warning(
                "a save with wait=False after step %d drains the pipeline, which changes the numbers of an "
                "asynchronous schedule: expected enough steps since the save before, found stages that it has not "
                "reached. Let more steps pass between saves (docs/checkpoints.md)",
                self._engine.steps,
            )
        self.finish()
        if not self._engine.cuts() or (self._states.parallelized and not self._states.schedule.flushes):
            self.drain()

    def finish(self) -> None:
        """Waits for the save that is under way, whose error is logged. Collective."""
        if self._present is not None:
            self._reach()
            self._engine.snapshots.settle()
            self._present._result.exception()

    def begin(self, write: Write, gather: PatientGather | None) -> BackgroundSave:
        """Begins to save the state after the steps so far with `write`, which gathers with `gather`. Collective."""
        save = self._present = BackgroundSave(self._reach)
        self._gather = gather
        progress = self._states.training.progress

        def collect(snapshot: Snapshot) -> Mapping[str, Any]:
            snapshot.wait()
            return self._states.join(snapshot.states(), progress)

        def publish(snapshot: Snapshot) -> Path:
            try:
                return write(lambda: collect(snapshot))
            finally:
                self._copier.recycle(snapshot.tensors())

        def write_beside(snapshot: Snapshot) -> None:
            self._copier.submit(publish, snapshot).add_done_callback(lambda ended: _report(save, ended))

        if hooks_allowed():
            atexit.unregister(self._leave)
            atexit.register(self._leave)
        snapshot = self._engine.snapshot(self._states.weights, self._states.collect, write_beside)
        here = time.perf_counter() - self._began - snapshot.stalled_seconds
        save._stalled = lambda: here + snapshot.stalled_seconds
        return save

    def close(self, failed: bool = False) -> None:
        """Waits for the save that is under way. Gives it up if the pipeline has `failed` or some stages need more steps
        for it. Ends the thread.
        """
        atexit.unregister(self._leave)
        save, gather = self._present, self._gather
        if save is not None and gather is not None and not save.done:
            if failed or not self._engine.snapshot_reached:
                gather.give_up()
                self._engine.snapshots.abandon()
            else:
                gather.hurry()
        # It has done all its work then, and passed on the result of a save that it was given.
        self._copier.close()
        if save is not None and not save.done:
            error = CheckpointError(
                "a save with wait=False was given up: expected more steps or a drain before the pipeline was closed, "
                "found an error, or stages whose state was not complete. Call drain() or the save's wait() before "
                "close(); older checkpoints are whole"
            )
            logging.getLogger("penstock").warning("%s", error)
            save._result.set_exception(error)

    def _leave(self) -> None:
        """Runs at the exit of the process, also after an error."""
        self.close(self._gather is not None and self._gather.has_failed())

    def _reach(self) -> None:
        """Has all stages make what is to be saved, and other processes no longer waited for without end."""
        if not self._engine.snapshot_reached:
            self.drain()
        if self._gather is not None:
            self._gather.hurry()


def _report(save: BackgroundSave, ended: "Future[Path]") -> None:
    """Passes the result on, and logs it."""
    error, logger = ended.exception(), logging.getLogger("penstock")
    if error is None:
        logger.info("saved %s; the training stood still for %.3f s", ended.result(), save.stalled_seconds)
        save._result.set_result(ended.result())
        return
    logger.warning("a save beside the training failed, and the training goes on: %s", error)
    save._result.set_exception(error)
