"""The checks of a traced chain, which compare it with its model; one process can make them for all.

Every check runs the model, and most run the chain as well.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from penstock.capturing.chain import LayerChain
from penstock.capturing.model_forms import ModelInputs
from penstock.capturing.sampled_models import SampledModel


@dataclass(frozen=True, slots=True, eq=False)
class ChainCheck:
    """A check of one statement about a model and its chain."""

    holds: Callable[[], bool]
    """Runs the check. Raises `CaptureError` where the chain must not be used."""
    otherwise: Callable[[ModelInputs], ModelInputs]
    """The inputs that the chain holds for if the statement is wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class UncheckedChain:
    """A chain, and the checks that must run before it is used."""

    chain: LayerChain
    sampled: SampledModel | None = None
    """The model that the checks run; None if there are none."""
    checks: tuple[ChainCheck, ...] = ()
    evaluates: bool = False
    """Whether it is in evaluation mode, and so its own evaluation."""
    communicates: bool = False
    """Whether the model waits for other processes in its forward, so that all must run it together."""

    def results(self) -> list[bool]:
        """Whether each check passes. The model is left as it was. Raises `CaptureError` as `ChainCheck.holds`."""
        with without_garbage_collection():
            return [check.holds() for check in self.checks]

    def after(self, results: Sequence[bool]) -> LayerChain:
        """The chain after all checks; `results`: whether each of them passed."""
        chain, inputs = self.chain, self.chain.inputs
        for check, passed in zip(self.checks, results, strict=True):
            inputs = inputs if passed else check.otherwise(inputs)
        if inputs is chain.inputs:
            return chain
        checked = replace(chain, inputs=inputs)
        return replace(checked, evaluation=lambda: checked) if self.evaluates else checked

    def checked(self) -> LayerChain:
        """The chain after all checks, which this process runs itself."""
        return self.after(self.results())


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
