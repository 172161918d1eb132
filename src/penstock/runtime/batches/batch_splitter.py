"""Cuts a user's batch into the microbatches of a step or of an evaluation, and checks it."""

from dataclasses import dataclass
from typing import Any

from penstock.capturing.chain import LayerChain
from penstock.runtime.batches.microbatches import Microbatch, count_microbatches, split
from penstock.runtime.batches.required_inputs import RequiredInputs, find_inputs
from penstock.scheduling.schedules import Schedule
from penstock.training.losses import LossWeight

__all__ = ["BatchSplitter"]


@dataclass(frozen=True, slots=True, eq=False)
class BatchSplitter:
    """Cuts batches for a process that requires some of the inputs of `chain`.

    An evaluation has a multiple of `in_step` microbatches, so that as many replicas evaluate equally often.
    """

    chain: LayerChain
    schedule: Schedule
    required: RequiredInputs
    loss_weight: LossWeight | None
    in_step: int

    def for_step(self, inputs: Any, target: Any) -> tuple[Microbatch, ...]:
        """The microbatches of a training step."""
        placement = self.schedule.placement
        slices = max(map(len, placement.stages)) if placement.split else 1
        return self.required.checked(
            split(self.chain.inputs, inputs, target, self.schedule.microbatches, slices, self._weigh)
        )

    def for_evaluation(self, inputs: Any, target: Any) -> tuple[Microbatch, ...]:
        """As many microbatches of the captured size as a batch makes; `target` is None if only outputs are wanted."""
        # The trace of the evaluation may hold for other sizes than that of the training.
        chain = self.chain.evaluation()
        count = count_microbatches(chain.inputs, inputs)
        weigh = None if target is None else self._weigh
        cut = split(chain.inputs, inputs, target, count + -count % self.in_step, weigh=weigh)
        return find_inputs(chain, self.required.stages).checked(cut)

    @property
    def _weigh(self) -> LossWeight | None:
        """The weight of a target; None where the target is not read."""
        return self.loss_weight if self.required.target else None
