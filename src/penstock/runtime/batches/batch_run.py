"""One batch on its way through the pipeline: how it runs, and what the ranks leave behind of it."""

from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from penstock.runtime.batches.results import MicrobatchResult
from penstock.runtime.devices.timestamps import Timestamp
from penstock.scheduling.actions import Action

ActionTiming: TypeAlias = tuple[int, Action, Timestamp, Timestamp]
"""The rank, its action, and when the action began and ended."""


@dataclass(slots=True, eq=False)
class BatchRun:
    """Describes one minibatch, or one batch of an evaluation, and holds the results of the last stage."""

    training: bool
    seed: int | None = 0
    """The seed of the random layers; None if they continue PyTorch's stream."""
    microbatches_before: int = 0
    """Microbatches trained before the present run of the schedule."""
    keeps_outputs: bool = False
    """In evaluation: whether the model's outputs are wanted instead of its loss."""
    admitted: int = 0
    """Microbatches admitted in the present run of the schedule, including those of this batch."""
    step: int = 0
    """In training, the number of the step, from 0; in a drain, of the step after it."""
    microbatches: int = 1
    """In training, how many microbatches a minibatch has."""
    results: dict[tuple[int, int], MicrobatchResult] = field(default_factory=dict)
    """By rank and microbatch: loss and metrics of the samples that the rank has of it."""
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """In evaluation, by microbatch: the values of the model's output."""
