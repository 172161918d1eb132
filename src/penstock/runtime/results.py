"""What a step returns: handles that wait only when they are read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from torch import Tensor

from penstock.runtime.transport import Ticket

__all__ = ["Loss", "LossPart", "StepResult"]


@dataclass(frozen=True, slots=True)
class LossPart:
    """What one replica of the last stage found: the loss of each of its `microbatches` times its share of the samples.

    `shares`: float64, one number for each, in their order; perhaps still on its way.
    """

    microbatches: Sequence[int]
    shares: Tensor | Ticket

    def read(self) -> Iterator[tuple[int, float]]:
        """Microbatch and share, one by one; waits."""
        shares = self.shares if isinstance(self.shares, Tensor) else self.shares.wait()[0]
        assert shares is not None
        yield from zip(self.microbatches, shares.tolist(), strict=True)


class Loss:
    """The mean loss over the samples of one minibatch, on every rank.

    ``float(loss)`` waits for the ranks of the last stage if it must; it never makes the pipeline flush. Only reading it
    costs anything.
    """

    def __init__(self, parts: Sequence[LossPart]) -> None:
        self._parts = tuple(parts)
        self._value: float | None = None

    def ready(self) -> bool:
        """Whether ``float`` would return at once."""
        return all(isinstance(part.shares, Tensor) or part.shares.ready() for part in self._parts)

    def item(self) -> float:
        """The loss as a number."""
        return float(self)

    def __float__(self) -> float:
        if self._value is None:
            shares = [pair for part in self._parts for pair in part.read()]
            # In the order of the microbatches, whoever computed them: the sum has the same bits for any placement.
            self._value = sum(share for _, share in sorted(shares, key=itemgetter(0)))
            self._parts = ()
        return self._value

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
