"""The history in a checkpoint that was saved without a drain: what a run that continues from it needs beside the state.

Under a schedule without a flush microbatches are in flight at every moment. They are not saved: the run that goes on
computes them again, with the older versions of the weights that they read. These are in the history, with what else
crosses the cut: norms of gradients, the scales of losses, and the buffers of replicas, each of which has seen other
microbatches.

A history fits the plan and the schedule that it was made under. Under others the training goes on from the newest
weights, as after a drain.
"""

import logging
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from penstock.arguments import is_count
from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.manifests import StoredTensor, read_value
from penstock.scheduling.schedules import Schedule
from penstock.torch_internals import pytrees as pytree
from penstock.training.recipes import Recipe
from penstock.values.plans import Plan

History: TypeAlias = Mapping[str, Any]

PARTS = ("weights", "stages", "buffers")
"""Weights by name and version; counts, norms and scales by stage; buffers by stage, replica and number."""


def describe_run(plan: Plan, schedule: Schedule, recipe: Recipe) -> str:
    """All that decides which versions of which weights a run reads, in one line."""
    stages = " ".join(f"{stage.start}-{stage.stop}x{len(stage.ranks)}" for stage in plan.stages)
    sync = " with vertical sync" if plan.vertical_sync else ""
    text = f"{schedule.name}{sync}, layers {stages} ({plan.routing}), {plan.microbatches} microbatches"
    if recipe.version_dtype is not None:
        text += f", versions in {recipe.version_dtype}"
    if any(map(recipe.predicts, schedule.guarantees.delays)):
        text += ", predicted weights"
    return text + (", with norms" if recipe.needs_norms else "")


def open_history(state: Mapping[str, Any], run: str, rank: int) -> History | None:
    """The history in `state`, read, if it is one of the same `run`. If it is not, rank 0 logs what that means."""
    history: History | None = state.get("history")
    if history is None:
        return None
    saved = state["pipeline"]["run"]
    if saved == run:
        return {part: pytree.tree_map_only(StoredTensor, read_value, history.get(part, {})) for part in PARTS}
    if rank == 0:
        logging.getLogger("penstock").info(
            "the checkpoint was saved without a drain by a run of %s, and this is one of %s: it goes on from the "
            "newest weights, as after a drain",
            saved,
            run,
        )
    return None


def updates_of(history: History | None) -> dict[int, int]:
    """By stage, the updates that it had made."""
    return {} if history is None else {int(stage): kept["updates"] for stage, kept in history["stages"].items()}


def check_history(state: Mapping[str, Any], parameters: Mapping[str, Tensor], run: str) -> None:
    """Raises `CheckpointError` unless the history in `state`, if it is of the same `run`, is whole and fits."""
    history = state.get("history")
    if history is None:
        return
    parts = [history, *(history.get(part, {}) for part in PARTS)] if isinstance(history, Mapping) else [history]
    if not all(isinstance(part, Mapping) for part in parts) or not isinstance(state["pipeline"].get("run"), str):
        _refuse("history", "what Pipeline.save(...) wrote", history)
    if state["pipeline"]["run"] != run:
        return
    for name, versions in history.get("weights", {}).items():
        if name in parameters and not all(
            isinstance(tensor, Tensor | StoredTensor) and tensor.shape == parameters[name].shape and _is_past(version)
            for version, tensor in versions.items()
        ):
            _refuse(f"history/weights/{name}", f"tensors of the shape {tuple(parameters[name].shape)}", versions)
    for stage, kept in history.get("stages", {}).items():
        counted = isinstance(kept, Mapping) and is_count(kept.get("updates"), 0)
        if not counted or not all(map(_is_past, kept.get("norms", {}))):
            _refuse(f"history/stages/{stage}", "the updates and norms of a stage", kept)


def _is_past(version: str) -> bool:
    return version == "0" or (version.startswith("-") and version[1:].isdecimal())


def _refuse(name: str, expected: str, found: object) -> None:
    raise CheckpointError(f"{name} of the state: expected {expected}, found {found!r:.80}. Load another checkpoint")
