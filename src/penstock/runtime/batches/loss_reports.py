"""What the last stage tells every process: the loss of a step, the outputs of a prediction.

Only reading a result waits. The ranks of the last stage send at once, each what it has computed itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.runtime.batches.microbatches import Microbatch
from penstock.runtime.batches.passes import Pass
from penstock.runtime.batches.results import Figures, Loss, Report
from penstock.runtime.devices.staging import Staging
from penstock.runtime.transport.transport import Channel, Edge, PendingMessage, Transport
from penstock.scheduling.placements import Placement

__all__ = ["Reports"]


@dataclass(frozen=True, slots=True)
class Reports:
    """The reports of the process in which the ranks `local` live, which is process `rank`, and computes on `device`."""

    transport: Transport
    local: Sequence[int]
    rank: int
    device: torch.device
    staging: Staging
    """From there to the host: who reads a loss waits until it is computed, and not for what the device does then."""
    names: dict[bool, tuple[str, ...]] = field(default_factory=dict)
    """Of the metrics, in training and in evaluation: they shape the messages, so they must not change."""

    def loss(self, current: Pass, placement: Placement, microbatches: range) -> Loss:
        """The loss of a pass over `microbatches`; perhaps on its way."""
        reports = []
        for last in placement.stages[-1]:
            taken = placement.taken_by(last, microbatches)
            form = ("figures", current.training, len(taken))
            if not taken:
                continue
            if last in self.local:
                message = self._message(current, [current.figures[last, k] for k in taken])
                for edge in self._edges(last, placement):
                    self.transport.send(edge, form, (message,))
                reports.append(Report(taken, self.staging.to_host([message])))
            else:
                reports.append(Report(taken, self.transport.post(Edge(last, self.rank, Channel.REPORTS), form)))
        return Loss(reports)

    def outputs(self, current: Pass, placement: Placement, microbatches: Sequence[Microbatch]) -> list[list[Tensor]]:
        """The values of the model's output for each microbatch. Waits for them."""
        tickets: dict[int, PendingMessage] = {}
        for k, microbatch in enumerate(microbatches):
            form = ("output", microbatch.signature)
            last = placement.rank_of(len(placement.stages) - 1, k)
            if last in self.local:
                for edge in self._edges(last, placement):
                    self.transport.send(edge, form, current.outputs[k])
            else:
                tickets[k] = self.transport.post(Edge(last, self.rank, Channel.REPORTS), form)
        messages = [tickets[k].wait() if k in tickets else current.outputs[k] for k in range(len(microbatches))]
        return [[tensor.to(self.device) for tensor in message if tensor is not None] for message in messages]

    def _edges(self, last: int, placement: Placement) -> list[Edge]:
        return [Edge(last, rank, Channel.REPORTS) for rank in range(placement.ranks) if rank not in self.local]

    def _message(self, current: Pass, figures: Sequence[Figures]) -> Tensor:
        names = self.names.setdefault(current.training, figures[0].names)
        values: list[Tensor] = []
        weights: list[float] = []
        for one in figures:
            if one.names != names:
                raise PenstockError(
                    f"loss_fn returned the metrics {names} before and {one.names} now: return the same names for "
                    "every microbatch"
                )
            values += one.values
            weights.append(one.weight)
        # Once for all microbatches of a step, when the last one is done.
        alike = all([value.dtype is values[0].dtype and value.shape == values[0].shape for value in values])
        rows = torch.stack(values if alike else [value.double().reshape(()) for value in values])
        head, each = _frame(names, tuple(weights), rows.device)
        return torch.cat((head, rows.double().view(-1) * each))


@lru_cache(maxsize=8)
def _frame(names: tuple[str, ...], weights: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """What stands before the shares, and the weight of each of them. Most steps have the same."""
    head = torch.tensor(Report.head(names), dtype=torch.float64, device=device)
    column = torch.tensor(weights, dtype=torch.float64, device=device)
    return head, column.repeat_interleave(1 + len(names))
