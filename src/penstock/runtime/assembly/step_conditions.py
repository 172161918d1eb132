"""What must hold for a step to train anything, checked before the step begins."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.runtime.parameters.model_claims import ModelClaim


class StepConditions:
    """The conditions for steps of a pipeline on `modules`. `trains`: whether any process trains a parameter."""

    def __init__(self, modules: Sequence[nn.Module], trains: bool) -> None:
        self._claim = ModelClaim(modules)
        self._trains, self._averaged = trains, False

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context manager in which the parameters hold averages."""
        self._averaged = True
        try:
            yield
        finally:
            self._averaged = False

    def check(self) -> None:
        """Raises `PenstockError` if a step would train nothing, or other weights than those of this pipeline."""
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            mode = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
            raise PenstockError(
                f"step() was called under {mode}: expected gradients to be enabled, since the step would train "
                "nothing. Call step() outside of that block, or evaluate() or predict() for a result without training"
            )
        if not self._trains:
            raise PenstockError(
                "step() would train nothing: expected an optimizer with at least one parameter that requires a "
                "gradient on some rank, found none. Unfreeze parameters before the pipeline is built, or return an "
                "optimizer over them; evaluate() and predict() need none"
            )
        self.check_weights("step")
        self._claim.check()

    def check_weights(self, call: str) -> None:
        """Raises `PenstockError` if the parameters hold averages, with which `call` would train, save or be undone."""
        if self._averaged:
            raise PenstockError(
                f"{call}() was called inside of averaged(): expected evaluations, predictions, state dicts and "
                f"save_weights() only, since the parameters hold averages there. Call {call}() after the block"
            )
