"""A user's batch on its way in: cut into the microbatches of a step or of an evaluation, and checked."""

from dataclasses import dataclass
from typing import Any

from penstock.capturing.chain import LayerChain
from penstock.runtime.batches.microbatches import Microbatch, chunks, split
from penstock.runtime.batches.required_inputs import RequiredInputs, find_required_inputs
from penstock.scheduling.schedules import Schedule
from penstock.training.losses import LossWeight

__all__ = ["BatchCutter"]


@dataclass(frozen=True, slots=True, eq=False)
class BatchCutter:
    """For a process that `reads` some of what `chain` takes. `in_step`: so many replicas evaluate equally often."""

    chain: LayerChain
    schedule: Schedule
    reads: RequiredInputs
    loss_weight: LossWeight | None
    in_step: int

    def for_step(self, inputs: Any, target: Any) -> tuple[Microbatch, ...]:
        """The microbatches of a training step."""
        placement = self.schedule.placement
        parts = max(map(len, placement.stages)) if placement.split else 1
        return self.reads.checked(
            split(self.chain.inputs, inputs, target, self.schedule.microbatches, parts, self._weigh)
        )

    def for_evaluation(self, inputs: Any, target: Any) -> tuple[Microbatch, ...]:
        """As many microbatches as the captured size makes of a batch; `target` None if only outputs are wanted."""
        # The trace of the evaluation may hold for other sizes than that of the training.
        chain = self.chain.evaluation()
        count = chunks(chain.inputs, inputs)
        weigh = None if target is None else self._weigh
        cut = split(chain.inputs, inputs, target, count + -count % self.in_step, weigh=weigh)
        return find_required_inputs(chain, self.reads.stages).checked(cut)

    @property
    def _weigh(self) -> LossWeight | None:
        """What weighs a target; nothing where the target is not read."""
        return self.loss_weight if self.reads.target else None
