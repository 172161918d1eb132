"""Sends the results of the last stage to every process: the loss of a step, the outputs of a prediction.

Only reading a result waits. The ranks of the last stage send at once, each what it has computed itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.runtime.batches.batch_run import BatchRun
from penstock.runtime.batches.microbatches import Microbatch
from penstock.runtime.batches.results import Loss, MicrobatchResult, ReplicaResults
from penstock.runtime.devices.staging import Staging
from penstock.runtime.transport.transport import Channel, Edge, PendingMessage, Transport
from penstock.scheduling.placements import Placement


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
                message = self._message(batch, [batch.results[last, k] for k in taken])
                for edge in self._edges(last, placement):
                    self.transport.send(edge, kind, (message,))
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
                for edge in self._edges(last, placement):
                    self.transport.send(edge, kind, batch.outputs[k])
            else:
                pending[k] = self.transport.post(Edge(last, self.rank, Channel.REPORTS), kind)
        messages = [pending[k].wait() if k in pending else batch.outputs[k] for k in range(len(microbatches))]
        return [[tensor.to(self.device) for tensor in message if tensor is not None] for message in messages]

    def _edges(self, last: int, placement: Placement) -> list[Edge]:
        return [Edge(last, rank, Channel.REPORTS) for rank in range(placement.ranks) if rank not in self.local]

    def _message(self, batch: BatchRun, results: Sequence[MicrobatchResult]) -> Tensor:
        metric_names = self.metric_names.setdefault(batch.training, results[0].metric_names)
        values: list[Tensor] = []
        weights: list[float] = []
        for one in results:
            if one.metric_names != metric_names:
                raise PenstockError(
                    f"loss_fn returned the metrics {metric_names} before and {one.metric_names} now: return the same "
                    "names for every microbatch"
                )
            values += one.values
            weights.append(one.weight)
        # Once for all microbatches of a step, when the last one is done.
        alike = all([value.dtype is values[0].dtype and value.shape == values[0].shape for value in values])
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
