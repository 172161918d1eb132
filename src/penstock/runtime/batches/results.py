"""The results of a step: handles that wait only when they are read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import isfinite
from operator import add
from typing import NamedTuple, NoReturn, cast

from torch import Tensor

from penstock.errors import PenstockError
from penstock.runtime.devices.staging import Staged
from penstock.runtime.transport.transport import PendingMessage


class MicrobatchResult(NamedTuple):
    """Holds loss and metrics of one microbatch, or of the slice of it that one replica of the last stage has."""

    metric_names: tuple[str, ...]
    values: tuple[Tensor, ...]
    """The loss and then the metrics, each one number."""
    weight: float
    """The share of the minibatch that the values are means over."""


@dataclass(frozen=True, slots=True)
class ReplicaResults:
    """Holds the message with the results of one replica of the last stage for `microbatches`, in their order."""

    microbatches: Sequence[int]
    message: Staged | PendingMessage
    """A tensor on the host, perhaps still in flight: `header`, then one row of numbers for each microbatch. They are
    multiplied by the weight of the microbatch.
    """

    @staticmethod
    def header(names: Sequence[str]) -> list[float]:
        """The length of a row, and the names of the metrics as UTF-8, one line each.

        Header and rows are numbers of one tensor, since a message of two tensors costs twice as much.
        """
        return [1 + len(names), *"\n".join(names).encode()]

    def ready(self) -> bool:
        """Whether `read` would return at once."""
        return self.message[1].query() if isinstance(self.message, tuple) else self.message.ready()

    def read(self) -> tuple[tuple[str, ...], list[tuple[int, list[float]]]]:
        """Waits for the message, and returns the names and the row of each microbatch."""
        if isinstance(self.message, tuple):
            (message,), event = self.message
            event.synchronize()
        else:
            (message,) = cast("tuple[Tensor]", self.message.wait())
        width, *numbers = message.tolist()
        size = int(width)
        start = len(numbers) - size * len(self.microbatches)
        names = tuple(bytes(map(int, numbers[:start])).decode().splitlines())
        rows = [numbers[row : row + size] for row in range(start, len(numbers), size)]
        return names, list(zip(self.microbatches, rows, strict=True))


class Loss:
    """Holds the mean loss over the samples of one minibatch, on every rank.

    ``float(loss)`` waits for the ranks of the last stage if it must; it never flushes the pipeline. Only reading it
    costs anything.
    """

    def __init__(self, results: Sequence[ReplicaResults]) -> None:
        self._results = tuple(results)
        self._values: dict[str, float] = {}
        self.nonfinite: tuple[int, ...] = ()
        """After the loss was read: the microbatches whose loss is not finite."""

    def ready(self) -> bool:
        """Whether ``float`` would return at once."""
        return all(result.ready() for result in self._results)

    def item(self) -> float:
        """The loss as a number."""
        return float(self)

    def backward(self) -> NoReturn:
        """Raises `PenstockError`: `Pipeline.step` has computed the gradients."""
        raise PenstockError("a loss of a pipeline has no backward: step(x, y) has computed the gradients. Leave it out")

    def means(self) -> Mapping[str, float]:
        """Waits, and returns the loss under the name "" and the metrics under theirs."""
        if not self._values:
            read = [result.read() for result in self._results]
            if len(found := {names for names, _ in read}) > 1:
                raise PenstockError(
                    f"loss_fn returned different metrics on the replicas of the last stage: {found}. "
                    "Return the same names for every microbatch"
                )
            rows = [row for _, rows in read for row in rows]
            # In the order of the microbatches, so that the sums have the same bits for any placement.
            rows.sort(key=lambda row: row[0])
            self.nonfinite = tuple(dict.fromkeys(microbatch for microbatch, row in rows if not isfinite(row[0])))
            # One addition after the other: since Python 3.12, `sum` of floats compensates for rounding.
            sums = [reduce(add, column) for column in zip(*(shares for _, shares in rows), strict=True)]
            self._values = dict(zip(("", *read[0][0]), sums, strict=True))
            self._results = ()
        return self._values

    def __float__(self) -> float:
        return self.means()[""]

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __str__(self) -> str:
        return str(float(self))

    def __repr__(self) -> str:
        return f"Loss({float(self)})" if self.ready() else "Loss(in flight)"


class Metrics(Mapping[str, float]):
    """Maps the names of the metrics that `loss_fn` returned to their means over the minibatch, on every rank.

    Reading it waits, as reading the loss does.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def __getitem__(self, name: str) -> float:
        if not name:
            raise KeyError(name)
        return self._loss.means()[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._loss.means() if name)

    def __len__(self) -> int:
        return len(self._loss.means()) - 1

    def __repr__(self) -> str:
        return f"Metrics({dict(self)})" if self._loss.ready() else "Metrics(in flight)"


@dataclass(frozen=True, slots=True)
class StepResult:
    """Holds the result of `Pipeline.step` or `Pipeline.evaluate`."""

    loss: Loss
    rates: tuple[float | Tensor | None, ...] = ()

    @property
    def lr(self) -> tuple[float, ...]:
        """The learning rates by parameter group, as ``pipe.optimizers`` have them in order: of the last update of this
        process in or before the step; before the first update, of that one. 0 for a group without a rate.

        Under ``pipedream``, where a step makes several updates, these are the rates of its last one. It is empty on a
        process that trains nothing, and for an evaluation. A rate that is a tensor on a GPU is waited for.
        """
        return tuple(0.0 if rate is None else float(rate) for rate in self.rates)

    @property
    def metrics(self) -> Metrics:
        """The metrics that `loss_fn` returned beside the loss."""
        return Metrics(self.loss)
