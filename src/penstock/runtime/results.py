"""What a step returns: handles that wait only when they are read."""

from dataclasses import dataclass

from torch import Tensor

from penstock.runtime.transport import Ticket

__all__ = ["Loss", "StepResult"]


class Loss:
    """The mean loss over the samples of one minibatch, on every rank.

    ``float(loss)`` waits for the rank of the last stage if it must; it never makes the pipeline flush. Only reading it
    costs anything.
    """

    def __init__(self, source: Tensor | Ticket) -> None:
        self._source = source

    def ready(self) -> bool:
        """Whether ``float`` would return at once."""
        return isinstance(self._source, Tensor) or self._source.ready()

    def item(self) -> float:
        """The loss as a number."""
        return float(self)

    def __float__(self) -> float:
        if not isinstance(self._source, Tensor):
            (loss,) = self._source.wait()
            assert loss is not None
            self._source = loss
        return float(self._source)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __str__(self) -> str:
        return str(float(self))

    def __repr__(self) -> str:
        return f"Loss({float(self)})" if self.ready() else "Loss(on its way)"


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of `Pipeline.step` or `Pipeline.evaluate`."""

    loss: Loss
