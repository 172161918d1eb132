"""A minibatch that the user has cut into microbatches, each of its own shape."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Microbatches(NamedTuple):
    """The batches of a step, one for each microbatch: ``pipe.step(penstock.Microbatches(inputs, targets))``.

    They may have different lengths (each padded to its own longest sequence) and different numbers of samples. Where
    lengths differ, `loss_weight` must say what the loss is a mean over.
    """

    inputs: Sequence[Any]
    """For each microbatch what `Pipeline.step` takes as inputs."""
    targets: Sequence[Any] | None = None
    """For each microbatch its target; None if the model computes its loss itself."""
