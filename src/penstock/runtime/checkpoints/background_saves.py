"""Saves that go on beside the training: `Pipeline.save` with ``wait=False``.

The state of each stage is copied to host memory while the next step computes, and a thread writes the copies. At most
one save is under way: the next one waits for it.

A stage is copied when it has made all updates that the checkpoint is to have. Under a schedule without a flush that is
later on earlier stages, while newer microbatches are in flight. The states of the stages are joined again to the state
of a process.
"""

import atexit
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from penstock.errors import CheckpointError, PenstockError
from penstock.progress import warn_once
from penstock.runtime.checkpoints.manifests import copied_value
from penstock.runtime.checkpoints.training_state import TrainingState, kept
from penstock.runtime.collectives.store_gathers import PatientGather
from penstock.runtime.devices.process_hooks import hooks_allowed
from penstock.runtime.engine.local_stage import LocalStages
from penstock.runtime.engine.snapshots import REST, Snapshot
from penstock.runtime.parameters.shards import whole
from penstock.runtime.parameters.weight_versions import VersionedWeights
from penstock.scheduling.schedules import Schedule

Count: TypeAlias = int | None
Place: TypeAlias = str | Path
"""A directory."""
Write: TypeAlias = Callable[[Callable[[], Mapping[str, Any]]], Path]
"""Writes what a function returns, the state of this process. Returns where the checkpoint is. Called in a thread."""


@dataclass(frozen=True, slots=True, eq=False)
class StageStates:
    """Collects the states of the `stages` of this process. Of replicas the first one is saved, and of those that share
    the optimizer's state also the parts of the others.

    `parallelized`: a hook may have spread tensors over processes, so that all of them collect together. `predicted`:
    forwards may read other weights than the optimizer steps.
    """

    training: TrainingState
    schedule: Schedule
    stages: LocalStages
    parallelized: bool
    predicted: bool
    weights: Mapping[int, VersionedWeights] = field(init=False)
    """By stage, of those that this process saves."""

    def __post_init__(self) -> None:
        weights = {
            index: stage.weights
            for rank, own in self.stages.items()
            for index, stage in own.items()
            if stage.shares is not None or self._is_saved(index, rank)
        }
        object.__setattr__(self, "weights", weights)

    def collect(self, stage: int) -> dict[str, Any]:
        """The state of `stage`, or for `REST` what no update changes: nested values with the tensors themselves.

        Buffers are copies, since forwards change them.
        """
        return self._rest() if stage == REST else self._stage(stage)

    def join(self, parts: Mapping[int, Mapping[str, Any]], progress: Mapping[str, Any]) -> dict[str, Any]:
        """What `TrainingState.collect` returns, of copies of all parts and the part ``pipeline`` of the moment of the
        cut. With a part ``history`` if there is any, and what it is the history of.
        """
        empty: dict[str, Any] = {name: {} for name in ("state", "options", "classes", "hooks")}
        state: dict[str, Any] = {"model": {}, "optimizer": empty, "pipeline": dict(progress)}
        for part in parts.values():
            _merge(state, part)
        if "history" in state:
            state["pipeline"]["run"] = self.training.run
        return state

    def _stage(self, stage: int) -> dict[str, Any]:
        training, weights = self.training, self.weights[stage]
        engine, updater = training.engine, training.updater
        own = {id(parameter) for parameter in weights.stepped.values()}
        updater.choose(stage)
        saved = any(stage in stages and self._is_saved(stage, rank) for rank, stages in self.stages.items())
        state = {
            "model": {name: kept(t) for name, t in training.held.items() if saved and id(t) in own},
            "optimizer": training.named(whole, weights.stepped.keys()),
            "pipeline": {**updater.state(stage), **engine.scales.state(stage)},
        }
        if saved and engine.in_run and (self.predicted or not self.schedule.flushes):
            history = engine.history_of(stage)
            history["stages"][str(stage)]["updates"] = updater.updates_of(stage)
            state["history"] = history
        return state

    def _rest(self) -> dict[str, Any]:
        training = self.training
        stepped = {id(p) for own in self.stages.values() for s in own.values() for p in s.weights.stepped.values()}
        every = [(self._is_saved(index, r), s) for r, stages in self.stages.items() for index, s in stages.items()]
        own = {id(buffer) for saved, held in every for buffer in held.weights.buffers if saved}
        later = {id(buffer) for _, held in every for buffer in held.weights.buffers} - own
        later |= set() if training.saves_frozen else set(map(id, training.frozen.values()))
        rest = {name: t for name, t in training.held.items() if id(t) not in stepped and id(t) not in later}
        buffers = training.chain.buffers
        copies = {name: copied_value(kept(t)) if name in buffers else kept(t) for name, t in rest.items()}
        state: dict[str, Any] = {"model": copies}
        replicas: dict[str, dict[str, Tensor]] = {}
        for rank, stages in self.stages.items():
            for index, stage in stages.items():
                if (replica := self._replica(index, rank)) and stage.weights.buffers:
                    replicas[f"{index}/{replica}"] = {
                        str(number): whole(buffer.detach()).clone()
                        for number, buffer in enumerate(stage.weights.buffers)
                    }
        if replicas and training.engine.in_run:
            state["history"] = {"buffers": replicas}
        return state

    def _is_saved(self, stage: int, rank: int) -> bool:
        """Whether what all replicas of `stage` have is saved by `rank`."""
        return self.parallelized or self._replica(stage, rank) == 0

    def _replica(self, stage: int, rank: int) -> int:
        return self.schedule.placement.stages[stage].index(rank)


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
            warn_once(
                "a save with wait=False after step %d drains the pipeline, which changes the numbers of an "
                "asynchronous schedule: expected enough steps since the save before, found stages that it has not "
                "reached. Let more steps pass between saves (docs/checkpoints.md)",
                self._engine.steps,
            )
        self.finish()
        # Modules and losses have seen microbatches that a run which continues without them computes again.
        later = self._states.parallelized or self._states.training.beside(scales=False)
        if not self._engine.cuts() or (later and not self._states.schedule.flushes):
            self.drain()

    def settle(self) -> None:
        """Waits for the save that is under way, and drains. Collective."""
        self.finish()
        self.drain()

    def finish(self) -> None:
        """Waits for the save that is under way, whose error is logged. Collective."""
        if self._present is not None:
            cause = None
            # Has all stages make what is to be saved, and other processes no longer waited for without end.
            if not self._engine.snapshot_reached:
                try:
                    self.drain()
                except PenstockError as error:
                    cause = error
            if self._gather is not None:
                self._gather.hurry()
            if not self._engine.snapshots.settle():
                # A step has failed, and with it the microbatches that some stages needed.
                self._give_up(self._present, cause)
            self._present._result.exception()

    def begin(self, write: Write, gather: PatientGather | None) -> BackgroundSave:
        """Begins to save the state after the steps so far with `write`, which gathers with `gather`. Collective."""
        save = self._present = BackgroundSave(self.finish)
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
            else:
                gather.hurry()
        # It has done all its work then, and passed on the result of a save that it was given.
        self._copier.close()
        if save is not None and not save.done:
            self._give_up(save)

    def _give_up(self, save: BackgroundSave, cause: PenstockError | None = None) -> None:
        """Ends `save`, which some stages have not reached; `cause`: why they could not."""
        self._engine.snapshots.abandon()
        error = CheckpointError(
            "a save with wait=False was given up: expected more steps or a drain before the pipeline was closed, "
            "found an error, or stages whose state was not complete. Call drain() or the save's wait() before "
            "close(); older checkpoints are whole"
        )
        error.__cause__ = cause
        logging.getLogger("penstock").warning("%s", error)
        save._result.set_exception(error)

    def _leave(self) -> None:
        """Runs at the exit of the process, also after an error."""
        self.close(self._gather is not None and self._gather.has_failed())


def _report(save: BackgroundSave, ended: "Future[Path]") -> None:
    """Passes the result on, and logs it."""
    error, logger = ended.exception(), logging.getLogger("penstock")
    if error is None:
        logger.info("saved %s; the training stood still for %.3f s", ended.result(), save.stalled_seconds)
        save._result.set_result(ended.result())
        return
    logger.warning("a save beside the training failed, and the training goes on: %s", error)
    save._result.set_exception(error)


def _merge(state: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Adds the entries of `part` to those of `state`, table by table."""
    for key, value in part.items():
        if isinstance(value, Mapping) and isinstance(state.get(key), dict):
            _merge(state[key], value)
        else:
            state[key] = dict(value) if isinstance(value, Mapping) else value
