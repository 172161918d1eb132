"""The results of a batch: what its ranks leave behind, how it reaches every process, and handles that wait when read.

The ranks of the last stage send losses and outputs at once, each what it has computed itself. Only reading one waits.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from math import isfinite
from operator import add
from typing import NamedTuple, NoReturn, TypeAlias, cast

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.runtime.batches.microbatches import Microbatch
from penstock.runtime.devices.staging import Staged, Staging
from penstock.runtime.devices.timestamps import Timestamp
from penstock.runtime.transport.transport import Channel, Edge, PendingMessage, Transport
from penstock.scheduling.actions import Action
from penstock.scheduling.placements import Placement


class MicrobatchResult(NamedTuple):
    """Holds loss and metrics of one microbatch, or of the slice of it that one replica of the last stage has."""

    metric_names: tuple[str, ...]
    values: tuple[Tensor, ...]
    """The loss and then the metrics, each one number."""
    weight: float
    """The share of the minibatch that the values are means over."""


ActionTiming: TypeAlias = tuple[int, Action, Timestamp, Timestamp]
"""The rank, its action, and when the action began and ended."""


@dataclass(slots=True, eq=False)
class BatchRun:
    """Describes one minibatch, or one batch of an evaluation, and holds the results of the last stage."""

    training: bool
    seed: int | None = 0
    """The seed of the random layers; None if they continue PyTorch's stream."""
    microbatches_before: int = 0
    """Microbatches trained before the present run of the schedule."""
    keeps_outputs: bool = False
    """In evaluation: whether the model's outputs are wanted instead of its loss."""
    admitted: int = 0
    """Microbatches admitted in the present run of the schedule, including those of this batch."""
    step: int = 0
    """In training, the number of the step, from 0; in a drain, of the step after it."""
    microbatches: int = 1
    """In training, how many microbatches a minibatch has."""
    results: dict[tuple[int, int], MicrobatchResult] = field(default_factory=dict)
    """By rank and microbatch: loss and metrics of the samples that the rank has of it."""
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """In evaluation, by microbatch: the values of the model's output."""


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
    rates: Iterable[float | Tensor | None] = ()

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


@dataclass(frozen=True, slots=True)
class ResultBroadcast:
    """Exchanges results on behalf of the process `rank`, which holds the ranks `local` and computes on `device`."""

    transport: Transport
    local: Sequence[int]
    rank: int
    device: torch.device
    staging: Staging
    """Copies to the host: reading a loss waits until it is computed, but not for later work of the device."""
    metric_names: dict[bool, tuple[str, ...]] = field(default_factory=dict)
    """In training and in evaluation: the names of the metrics. They shape the messages, so they must not change."""

    def loss(self, batch: BatchRun, placement: Placement, microbatches: range) -> Loss:
        """The loss of `microbatches`; it may still be in flight."""
        results = []
        for last in placement.stages[-1]:
            taken = placement.microbatches_of(last, microbatches)
            kind = ("results", batch.training, len(taken))
            if not taken:
                continue
            if last in self.local:
                message = self._message(batch, last, taken)
                self._send(last, placement, kind, (message,))
                results.append(ReplicaResults(taken, self.staging.to_host([message])))
            else:
                results.append(ReplicaResults(taken, self.transport.post(Edge(last, self.rank, Channel.REPORTS), kind)))
        return Loss(results)

    def outputs(self, batch: BatchRun, placement: Placement, microbatches: Sequence[Microbatch]) -> list[list[Tensor]]:
        """The values of the model's output for each microbatch. Waits for them."""
        pending: dict[int, PendingMessage] = {}
        for k, microbatch in enumerate(microbatches):
            kind = ("output", microbatch.signature)
            last = placement.rank_of(len(placement.stages) - 1, k)
            if last in self.local:
                self._send(last, placement, kind, batch.outputs[k])
            else:
                pending[k] = self.transport.post(Edge(last, self.rank, Channel.REPORTS), kind)
        messages = [pending[k].wait() if k in pending else batch.outputs[k] for k in range(len(microbatches))]
        return [[tensor.to(self.device) for tensor in message if tensor is not None] for message in messages]

    def _send(self, last: int, placement: Placement, kind: Hashable, message: tuple[Tensor, ...]) -> None:
        for rank in range(placement.ranks):
            if rank not in self.local:
                self.transport.send(Edge(last, rank, Channel.REPORTS), kind, message)

    def _message(self, batch: BatchRun, last: int, microbatches: Sequence[int]) -> Tensor:
        metric_names = self.metric_names.setdefault(batch.training, batch.results[last, microbatches[0]].metric_names)
        values: list[Tensor] = []
        weights: list[float] = []
        alike = True
        for k in microbatches:
            one = batch.results[last, k]
            if one.metric_names != metric_names:
                raise PenstockError(
                    f"loss_fn returned the metrics {metric_names} before and {one.metric_names} now: return the same "
                    "names for every microbatch"
                )
            values += one.values
            weights.append(one.weight)
            for value in one.values:
                alike &= value.dtype is values[0].dtype and value.shape == values[0].shape
        # Once for all microbatches of a step, when the last one is done.
        rows = torch.stack(values if alike else [value.double().reshape(()) for value in values])
        header, weight_of_each = _header_and_weights(metric_names, tuple(weights), rows.device)
        return torch.cat((header, rows.double().view(-1) * weight_of_each))


@lru_cache(maxsize=8)
def _header_and_weights(
    names: tuple[str, ...], weights: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The header of a message, and the weight of each number after it. Most steps have the same ones."""
    header = torch.tensor(ReplicaResults.header(names), dtype=torch.float64, device=device)
    column = torch.tensor(weights, dtype=torch.float64, device=device)
    return header, column.repeat_interleave(1 + len(names))
