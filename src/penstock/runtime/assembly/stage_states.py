"""The state of a training stage by stage, as a snapshot copies it, and joined again to what a checkpoint holds.

A stage is copied when all of its updates are made that the checkpoint is to have. Under a schedule without a flush that
is later on earlier stages, while newer microbatches are in flight. These are not saved: a run that goes on from the
checkpoint computes them again, with the same weights, so the *history* has the older versions that they read.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.assembly.checkpoint import held_tensors, named_state
from penstock.runtime.engine.engine import Engine, LocalStages
from penstock.runtime.engine.snapshots import REST
from penstock.runtime.parameters.optimizer_steps import Updater
from penstock.runtime.parameters.shards import whole
from penstock.runtime.parameters.weight_versions import VersionedWeights
from penstock.capturing.chain import LayerChain
from penstock.scheduling.schedules import Schedule
from penstock.training.recipes import Recipe
from penstock.values.plans import Plan

__all__ = ["StageStates", "describe_run", "updates_of", "usable_history"]


@dataclass(frozen=True, slots=True, eq=False)
class StageStates:
    """Collects the states of the stages of one process. Of replicas the first one is saved."""

    chain: LayerChain
    plan: Plan
    schedule: Schedule
    recipe: Recipe
    stages: LocalStages
    optimizers: Sequence[torch.optim.Optimizer]
    updater: Updater
    engine: Engine
    parallelized: bool
    """Whether a `parallelize` hook may have spread tensors over processes, so that all of them collect together."""
    weights: Mapping[int, VersionedWeights] = field(init=False)
    """By stage, of those that this process saves."""

    def __post_init__(self) -> None:
        first = {
            index: stage.weights
            for rank, own in self.stages.items()
            for index, stage in own.items()
            if self.parallelized or self.schedule.placement.stages[index][0] == rank
        }
        object.__setattr__(self, "weights", first)

    @property
    def progress(self) -> dict[str, Any]:
        """The part ``pipeline`` as far as it belongs to no stage."""
        return {"microbatches": self.engine.trained, "seed": self.engine.seed}

    def collect(self, stage: int) -> dict[str, Any]:
        """The state of `stage`, or what no update changes: nested values with the tensors themselves.

        Buffers are copies, since forwards change them.
        """
        held = held_tensors(self.chain, [self.plan.stages[index] for index in self.weights])
        if stage == REST:
            stepped = {id(p) for weights in self.weights.values() for p in weights.stepped.values()}
            rest = {name: whole(tensor.detach()) for name, tensor in held.items() if id(tensor) not in stepped}
            state: dict[str, Any] = {"model": {name: t.clone() if name in self.chain.buffers else t for name, t in rest.items()}}
            if self.engine.in_run and (buffers := self._buffers_of_replicas()):
                state["history"] = {"buffers": buffers}
            return state
        weights = self.weights[stage]
        own = {id(parameter) for parameter in weights.stepped.values()}
        state = {
            "model": {name: whole(tensor.detach()) for name, tensor in held.items() if id(tensor) in own},
            "optimizer": named_state(self.optimizers, weights.stepped, self.updater.hooks),
            "pipeline": {**self.updater.state(stage), **self.engine.scale_state(stage)},
        }
        delays = self.schedule.guarantees.delays
        if self.engine.in_run and (not self.schedule.flushes or any(map(self.recipe.predicts, delays))):
            state["history"] = self.engine.history_of(stage)
            state["history"]["stages"][str(stage)]["updates"] = self.updater.updates_of(stage)
        return state

    def _buffers_of_replicas(self) -> dict[str, dict[str, dict[str, Tensor]]]:
        """Copies of the buffers of all replicas but the first, which have seen other microbatches: by stage, by number
        of the replica, and by their order.
        """
        found: dict[str, dict[str, dict[str, Tensor]]] = {}
        for rank, own in self.stages.items():
            for index, stage in own.items():
                replica = self.schedule.placement.stages[index].index(rank)
                if replica and stage.weights.buffers:
                    copies = {str(n): whole(b.detach()).clone() for n, b in enumerate(stage.weights.buffers)}
                    found.setdefault(str(index), {})[str(replica)] = copies
        return found

    def join(self, parts: Mapping[int, Mapping[str, Any]], progress: Mapping[str, Any]) -> dict[str, Any]:
        """What `state_dict` returns, of copies of all parts and of `progress`."""
        state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}, "options": {}}, "pipeline": dict(progress)}
        for part in parts.values():
            _merge(state, part)
        if "history" in state:
            state["history"]["run"] = describe_run(self.plan, self.schedule, self.recipe)
        return state


def describe_run(plan: Plan, schedule: Schedule, recipe: Recipe) -> str:
    """All that decides which versions of which weights a run reads, in one line."""
    stages = " ".join(f"{stage.start}-{stage.stop}*{len(stage.ranks)}" for stage in plan.stages)
    sync = " with vertical sync" if plan.vertical_sync else ""
    versions = f", versions in {recipe.version_dtype}" if recipe.version_dtype else ""
    predicted = ", predicted" if any(map(recipe.predicts, schedule.guarantees.delays)) else ""
    norms = ", with norms" if recipe.needs_norms else ""
    return f"{schedule.name}{sync}, layers {stages} {plan.routing}, {plan.microbatches} microbatches{versions}{predicted}{norms}"


def usable_history(state: Mapping[str, Any], run: str, rank: int) -> Mapping[str, Any] | None:
    """The history in `state` if it is of the same `run`; else the run begins with the newest weights, as after a drain,
    which the first `rank` logs.
    """
    history: Mapping[str, Any] | None = state.get("history")
    if history is None or history["run"] == run:
        return history
    if rank == 0:
        logging.getLogger("penstock").info(
            "the checkpoint was saved without a drain by a run of %s, and this is one of %s: it goes on from the newest "
            "weights, as after a drain",
            history["run"],
            run,
        )
    return None


def updates_of(history: Mapping[str, Any] | None) -> dict[int, int]:
    """By stage, the updates that it had made."""
    stages = {} if history is None else history.get("stages", {})
    return {int(stage): kept["updates"] for stage, kept in stages.items()}


def _merge(state: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Adds the entries of `part` to those of `state`, table by table."""
    for key, value in part.items():
        if isinstance(value, Mapping) and isinstance(state.get(key), dict):
            _merge(state[key], value)
        else:
            state[key] = dict(value) if isinstance(value, Mapping) else value
