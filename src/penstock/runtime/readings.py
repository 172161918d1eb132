"""What a process reads of a batch: some of the model's inputs, the target, or nothing but shapes.

The shapes of the inputs decide the shapes of all messages, so every process needs them; the values only those whose
stages read them. Where they are not read, tensors on the meta device do.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.capturing.chain import LayerChain, ModelInputs
from penstock.errors import PenstockError
from penstock.values.stages import Stage

__all__ = ["Readings", "find_readings"]


@dataclass(frozen=True, slots=True)
class Readings:
    """What the stages of one process read."""

    inputs: frozenset[str]
    """The model's inputs, by value name."""
    target: bool

    def check(self, inputs: Mapping[str, Tensor], target: Any) -> None:
        """Raises `PenstockError` if a tensor on the meta device stands where values are read."""
        without = sorted(name for name in self.inputs if name in inputs and inputs[name].is_meta)
        if self.target and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(target)):
            without.append("the target")
        if without:
            raise PenstockError(
                f"{', '.join(without)}: on the meta device, and the stages of this process read the values. Pass the "
                "batch itself wherever pipe.reads_inputs or pipe.reads_target says so"
            )


def find_readings(chain: LayerChain, stages: Iterable[Stage]) -> Readings:
    """What `stages`, those of one process, read in the mode that `chain` was captured in."""
    names: set[str] = set()
    target = False
    for stage in stages:
        names.update(name for layer in chain.layers[stage.start : stage.stop] for name in layer.inputs)
        if stage.stop == len(chain.layers):
            # The model may return an input as it is.
            names.update(chain.output.values)
            target = True
    return Readings(frozenset(names & _given(chain.inputs)), target)


def _given(inputs: ModelInputs) -> set[str]:
    return {name for name in inputs.names if name not in inputs.constants}
