"""Saves that go on beside the training: `Pipeline.save` with ``wait=False``.

The state of each stage is copied to host memory while the next step computes, and a thread writes the copies. At most one
save is under way: the next one waits for it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

from penstock.errors import CheckpointError
from penstock.runtime.assembly.stage_states import StageStates
from penstock.runtime.engine.engine import Engine
from penstock.runtime.engine.snapshots import Snapshot

__all__ = ["BackgroundSave", "BackgroundSaves", "Write"]

Write: TypeAlias = Callable[[Mapping[str, Any]], Path]
"""Writes a state, agrees with the other processes on the result, and returns where it is. Called in a thread."""


class BackgroundSave:
    """A save that was begun with ``pipe.save(..., wait=False)``."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._result: Future[Path] = Future()
        self._stalled_seconds: Callable[[], float] = lambda: 0.0

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not. Does not wait."""
        return self._result.done()

    @property
    def stalled_seconds(self) -> float:
        """How long the training of this process has stood still for this save so far, in seconds."""
        return self._stalled_seconds()

    def wait(self) -> Path:
        """Waits until the checkpoint is whole, and returns its directory. Collective.

        Under a schedule without a flush some stages may need more steps until they are saved; it then drains instead.
        Raises `CheckpointError` if the checkpoint could not be written; the training can go on.
        """
        if not self.done:
            self._finish()
        return self._result.result()


class BackgroundSaves:
    """The saves of a pipeline that do not stop its training."""

    def __init__(self, engine: Engine, states: StageStates) -> None:
        self._engine, self._states, self._copier = engine, states, engine.snapshots.copier
        self._present: BackgroundSave | None = None

    def begin(self, write: Write) -> BackgroundSave:
        """Begins to save the state after the steps so far with `write`. Waits for the save before. Collective.

        Drains where the state without what is in flight would not be enough to go on from.
        """
        began = time.perf_counter()
        self.finish()
        if not self._engine.cuts() or (self._states.parallelized and not self._states.schedule.flushes):
            self._engine.drain()
        save = self._present = BackgroundSave(self._reach)
        join, progress = self._states.join, self._states.progress

        def publish(snapshot: Snapshot) -> Path:
            snapshot.wait()
            try:
                return write(join(snapshot.states(), progress))
            finally:
                self._copier.recycle(snapshot.tensors())

        def write_beside(snapshot: Snapshot) -> None:
            save._result.set_running_or_notify_cancel()
            written = self._copier.submit(publish, snapshot)
            written.add_done_callback(lambda ended: _report(save, ended))

        snapshot = self._engine.snapshot(self._states.weights, self._states.collect, write_beside)
        here = time.perf_counter() - began - snapshot.stalled_seconds
        save._stalled_seconds = lambda: here + snapshot.stalled_seconds
        return save

    def finish(self) -> None:
        """Waits for the save that is under way, if there is one; its error was logged. Collective."""
        save, self._present = self._present, None
        if save is not None:
            if not save.done:
                self._reach()
                save._result.exception()
            self._engine.snapshots.settle()

    def close(self) -> None:
        """Ends the thread when its work is done. A save that not all stages have reached fails."""
        if self._present is not None and not self._present._result.running() and not self._present.done:
            self._engine.snapshots.abandon()
            self._present._result.set_exception(
                CheckpointError(
                    "a save with wait=False was not finished: the pipeline was closed after an error, while some stages "
                    "needed more steps for it. Load the checkpoint before"
                )
            )
        self._copier.close()

    def _reach(self) -> None:
        self._engine.finish_snapshot()


def _report(save: BackgroundSave, ended: "Future[Path]") -> None:
    """Passes the result on, and logs it."""
    error, logger = ended.exception(), logging.getLogger("penstock")
    if error is None:
        logger.info("saved %s; the training stood still for %.3f s", ended.result(), save.stalled_seconds)
        save._result.set_result(ended.result())
        return
    logger.warning("a save beside the training failed, and the training goes on: %s", error)
    save._result.set_exception(error)
