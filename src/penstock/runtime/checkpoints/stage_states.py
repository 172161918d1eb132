"""The state of a training stage by stage, as a snapshot copies it, and joined again to the state of a process.

A stage is copied when it has made all updates that the checkpoint is to have. Under a schedule without a flush that is
later on earlier stages, while newer microbatches are in flight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.runtime.checkpoints.training_state import TrainingState
from penstock.runtime.engine.engine import LocalStages
from penstock.runtime.engine.snapshots import REST
from penstock.runtime.parameters.shards import whole
from penstock.runtime.parameters.weight_versions import VersionedWeights
from penstock.scheduling.schedules import Schedule


@dataclass(frozen=True, slots=True, eq=False)
class StageStates:
    """Collects the states of the `stages` of this process. Of replicas the first one is saved.

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
            if self.parallelized or self._replica(index, rank) == 0
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
        state = {
            "model": {name: whole(t.detach()) for name, t in training.held.items() if id(t) in own},
            "optimizer": training.named(whole, weights.stepped.keys()),
            "pipeline": {**updater.state(stage), **engine.scale_state(stage)},
        }
        if engine.in_run and (self.predicted or not self.schedule.flushes):
            history = engine.history_of(stage)
            history["stages"][str(stage)]["updates"] = updater.updates_of(stage)
            state["history"] = history
        return state

    def _rest(self) -> dict[str, Any]:
        training = self.training
        stepped = {id(p) for own in self.stages.values() for s in own.values() for p in s.weights.stepped.values()}
        own = {id(b) for weights in self.weights.values() for b in weights.buffers}
        later = {id(b) for stages in self.stages.values() for s in stages.values() for b in s.weights.buffers} - own
        rest = {name: t for name, t in training.held.items() if id(t) not in stepped and id(t) not in later}
        buffers = training.chain.buffers
        copies = {name: whole(t.detach()).clone() if name in buffers else whole(t.detach()) for name, t in rest.items()}
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

    def _replica(self, stage: int, rank: int) -> int:
        return self.schedule.placement.stages[stage].index(rank)


def _merge(state: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Adds the entries of `part` to those of `state`, table by table."""
    for key, value in part.items():
        if isinstance(value, Mapping) and isinstance(state.get(key), dict):
            _merge(state[key], value)
        else:
            state[key] = dict(value) if isinstance(value, Mapping) else value
