"""What is left to prove of a chain that was traced, in parts that several processes can share.

Every part runs the model, most of them the chain as well. Processes that have captured the same chain need not all
prove it: what one of them finds holds for all.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from penstock.capturing.chain import LayerChain
from penstock.capturing.model_forms import ModelInputs
from penstock.capturing.reminders import lifted
from penstock.capturing.sampled_models import SampledModel

__all__ = ["Proof", "UnprovedChain", "without_garbage_collection"]


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """One statement about a model and its chain."""

    runs: int
    """How many runs of the model and of the chain it takes."""
    holds: Callable[[], bool]
    """Finds it out. Raises `CaptureError` where the chain must not be used."""
    otherwise: Callable[[ModelInputs], ModelInputs]
    """The inputs that the chain holds for if the statement is wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class UnprovedChain:
    """A chain, and what has to be known of it before it is used."""

    chain: LayerChain
    sampled: SampledModel | None = None
    """The model that the proofs run; None if there are none."""
    proofs: tuple[Proof, ...] = ()
    evaluates: bool = False
    """Whether it is in evaluation mode, and so its own evaluation."""
    communicates: bool = False
    """Whether the model waits for other processes in its forward, so that all must run it together."""

    def find(self, index: int) -> bool:
        """Whether proof `index` holds. The model is left as it was. Raises `CaptureError` as `Proof.holds`."""
        assert self.sampled is not None, "there is a proof"
        with lifted(self.sampled.model), without_garbage_collection():
            return self.proofs[index].holds()

    def concluded(self, found: Sequence[bool]) -> LayerChain:
        """The chain after all proofs; `found` says for each whether it holds."""
        chain, inputs = self.chain, self.chain.inputs
        for proof, holds in zip(self.proofs, found, strict=True):
            inputs = inputs if holds else proof.otherwise(inputs)
        if inputs is chain.inputs:
            return chain
        proved = replace(chain, inputs=inputs)
        return replace(proved, evaluation=lambda: proved) if self.evaluates else proved

    def proved(self) -> LayerChain:
        """The chain after all proofs, which this process finds itself."""
        return self.concluded([self.find(index) for index in range(len(self.proofs))])


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Looking for garbage among the objects of a trace takes a fifth of the time of a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
