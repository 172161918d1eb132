"""What a process reads of a batch: some of the model's inputs, the target, or nothing but shapes.

The shapes of the inputs decide the shapes of all messages, so every process needs them; the values only those whose
stages read them. Where they are not read, tensors on the meta device do.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from penstock.capturing.chain import LayerChain
from penstock.capturing.model_forms import ModelInputs
from penstock.errors import PenstockError
from penstock.runtime.batches.microbatches import Microbatch
from penstock.scheduling.schedules import Schedule
from penstock.torch_internals import pytrees as pytree
from penstock.values.plans import Plan, Stage

__all__ = ["RequiredInputs", "find_required_inputs", "held_stages"]


@dataclass(frozen=True, slots=True)
class RequiredInputs:
    """What the stages of one process read."""

    stages: tuple[Stage, ...]
    inputs: frozenset[str]
    """The model's inputs, by value name; where there are none, tensors on the meta device do."""
    target: bool
    """Whether the last stage is here; elsewhere the target may be None."""

    @property
    def values(self) -> bool:
        """Whether this process reads values of a batch at all."""
        return bool(self.inputs) or self.target

    def checked(self, microbatches: tuple[Microbatch, ...]) -> tuple[Microbatch, ...]:
        """`microbatches`. Raises `PenstockError` if tensors on the meta device stand where values are read."""
        inputs, target = microbatches[0].inputs, microbatches[0].target
        without = sorted(name for name in self.inputs if name in inputs and inputs[name].is_meta)
        if self.target and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(target)):
            without.append("the target")
        if without:
            raise PenstockError(
                f"{', '.join(without)}: on the meta device, and the stages of this process read the values. Pass the "
                "batch itself wherever pipe.reads.inputs or pipe.reads.target says so"
            )
        return microbatches


def held_stages(plan: Plan, schedule: Schedule, ranks: Iterable[int]) -> tuple[Stage, ...]:
    """The stages of `ranks`, those of one process, each once and in order."""
    held = {index for rank in ranks for index in schedule.stages_of(rank)}
    return tuple(plan.stages[index] for index in sorted(held))


def find_required_inputs(chain: LayerChain, stages: Iterable[Stage]) -> RequiredInputs:
    """What `stages`, those of one process, read in the mode that `chain` was captured in."""
    names: set[str] = set()
    target = False
    own = tuple(stages)
    for stage in own:
        names.update(name for layer in chain.layers[stage.start : stage.stop] for name in layer.inputs)
        if stage.stop == len(chain.layers):
            # The model may return an input as it is.
            names.update(chain.output.values)
            target = True
    return RequiredInputs(own, frozenset(names & _given(chain.inputs)), target)


def _given(inputs: ModelInputs) -> set[str]:
    return {name for name in inputs.names if name not in inputs.constants}
