"""A pass through the pipeline, a minibatch or an evaluation, and what ranks note of it."""

from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from penstock.runtime.batches.results import Figures
from penstock.runtime.devices.timestamps import Timestamp
from penstock.scheduling.actions import Action

__all__ = ["ActionTiming", "Pass"]

ActionTiming: TypeAlias = tuple[int, Action, Timestamp, Timestamp]
"""The rank, what it did, and from when to when."""


@dataclass(slots=True, eq=False)
class Pass:
    """One minibatch, or one batch of an evaluation, and what it leaves on the rank of the last stage."""

    training: bool
    seed: int | None = 0
    """Of the random layers; None if they go on in PyTorch's stream."""
    microbatches_before: int = 0
    """Microbatches trained before the present run of the schedule."""
    keeps_outputs: bool = False
    """In evaluation: whether the model's output is wanted, and not its loss."""
    admitted: int = 0
    """Microbatches admitted in the present run of the schedule, those of this pass included."""
    figures: dict[tuple[int, int], Figures] = field(default_factory=dict)
    """By rank and microbatch: what the last stage found of the rank's samples of it."""
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """In evaluation, by microbatch: the values of the model's output."""
