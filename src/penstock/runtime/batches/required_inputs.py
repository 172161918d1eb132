"""The parts of a batch that a process requires: some of the model's inputs, the target, or nothing but shapes.

The shapes of the inputs determine the shapes of all messages, so every process needs them. Values are needed only by
processes whose stages read them. Elsewhere tensors on the meta device are enough.
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


@dataclass(frozen=True, slots=True)
class RequiredInputs:
    """The inputs and the target that the stages of one process read."""

    stages: tuple[Stage, ...]
    inputs: frozenset[str]
    """The names of the model's inputs whose values are read; the others may be on the meta device."""
    target: bool
    """Whether the last stage is here; elsewhere the target may be None."""

    @property
    def values(self) -> bool:
        """Whether this process reads any values of a batch."""
        return bool(self.inputs) or self.target

    def checked(self, microbatches: tuple[Microbatch, ...]) -> tuple[Microbatch, ...]:
        """Returns `microbatches`. Raises `PenstockError` if a tensor that is read is on the meta device."""
        inputs, target = microbatches[0].inputs, microbatches[0].target
        without = sorted(name for name in self.inputs if name in inputs and inputs[name].is_meta)
        if self.target and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(target)):
            without.append("the target")
        if without:
            raise PenstockError(
                f"{', '.join(without)}: on the meta device, and the stages of this process read the values. Pass the "
                "batch itself where pipe.required_inputs names inputs or has target=True"
            )
        return microbatches


def held_stages(plan: Plan, schedule: Schedule, ranks: Iterable[int]) -> tuple[Stage, ...]:
    """The stages of `ranks`, which live in one process; each once, in order."""
    held = {index for rank in ranks for index in schedule.stages_of(rank)}
    return tuple(plan.stages[index] for index in sorted(held))


def find_inputs(chain: LayerChain, stages: Iterable[Stage]) -> RequiredInputs:
    """The inputs that `stages`, those of one process, read in the mode that `chain` was captured in."""
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
