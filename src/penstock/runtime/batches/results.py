"""What a step returns: handles that wait only when they are read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import NamedTuple, cast

from torch import Tensor

from penstock.errors import PenstockError
from penstock.runtime.devices.staging import Staged
from penstock.runtime.transport.transport import PendingMessage

__all__ = ["Figures", "Loss", "Metrics", "Report", "StepResult"]


class Figures(NamedTuple):
    """What the last stage found of one microbatch, or of the part that one of its replicas has."""

    names: tuple[str, ...]
    """Of the metrics that `loss_fn` returned."""
    values: tuple[Tensor, ...]
    """The loss and the metrics, each of one number."""
    weight: float
    """The share of the minibatch that they are the means over."""


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one replica of the last stage for each of its `microbatches`, in their order."""

    microbatches: Sequence[int]
    message: Staged | PendingMessage
    """A tensor on the host, `head` and the shares, one row for each microbatch; perhaps on its way."""

    @staticmethod
    def head(names: Sequence[str]) -> list[float]:
        """What stands before the shares: how many there are of a microbatch, and the names as UTF-8, a line for each.

        All are numbers of one tensor, since a message of two tensors costs twice as much.
        """
        return [1 + len(names), *"\n".join(names).encode()]

    def ready(self) -> bool:
        """Whether `read` would return at once."""
        return self.message[1].query() if isinstance(self.message, tuple) else self.message.ready()

    def read(self) -> tuple[tuple[str, ...], list[tuple[int, list[float]]]]:
        """The names, and the shares by microbatch; waits."""
        if isinstance(self.message, tuple):
            (message,), there = self.message
            there.synchronize()
        else:
            (message,) = cast("tuple[Tensor]", self.message.wait())
        width, *numbers = message.tolist()
        size = int(width)
        start = len(numbers) - size * len(self.microbatches)
        names = tuple(bytes(map(int, numbers[:start])).decode().splitlines())
        rows = [numbers[row : row + size] for row in range(start, len(numbers), size)]
        return names, list(zip(self.microbatches, rows, strict=True))


class Loss:
    """The mean loss over the samples of one minibatch, on every rank.

    ``float(loss)`` waits for the ranks of the last stage if it must; it never makes the pipeline flush. Only reading it
    costs anything.
    """

    def __init__(self, reports: Sequence[Report]) -> None:
        self._reports = tuple(reports)
        self._values: dict[str, float] = {}

    def ready(self) -> bool:
        """Whether ``float`` would return at once."""
        return all(report.ready() for report in self._reports)

    def item(self) -> float:
        """The loss as a number."""
        return float(self)

    def means(self) -> Mapping[str, float]:
        """The loss under the name "", and the metrics under theirs; waits."""
        if not self._values:
            read = [report.read() for report in self._reports]
            if len(found := {names for names, _ in read}) > 1:
                raise PenstockError(
                    f"loss_fn returned other metrics on one replica of the last stage than on another one: {found}. "
                    "Return the same names for every microbatch"
                )
            rows = [row for _, rows in read for row in rows]
            # In the order of the microbatches, whoever computed them: the sums have the same bits for any placement.
            rows.sort(key=lambda row: row[0])
            # One addition after the other, which since Python 3.12 `sum` does not do.
            sums = [reduce(add, column) for column in zip(*(shares for _, shares in rows), strict=True)]
            self._values = dict(zip(("", *read[0][0]), sums, strict=True))
            self._reports = ()
        return self._values

    def __float__(self) -> float:
        return self.means()[""]

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __str__(self) -> str:
        return str(float(self))

    def __repr__(self) -> str:
        return f"Loss({float(self)})" if self.ready() else "Loss(on its way)"


class Metrics(Mapping[str, float]):
    """What `loss_fn` returned beside the loss, each the mean over the samples of the minibatch, on every rank.

    A mapping from name to number. Reading it waits, as reading the loss does.
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
        return f"Metrics({dict(self)})" if self._loss.ready() else "Metrics(on their way)"


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of `Pipeline.step` or `Pipeline.evaluate`."""

    loss: Loss

    @property
    def metrics(self) -> Metrics:
        """What `loss_fn` returned beside the loss."""
        return Metrics(self.loss)
