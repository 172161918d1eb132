"""What the last stage tells every process: the loss of a step, the outputs of a prediction.

Only reading a result waits. The ranks of the last stage send at once, each what it has computed itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.runtime.microbatches import Microbatch
from penstock.runtime.results import Loss, LossPart
from penstock.runtime.transport import Edge, Ticket, Transport
from penstock.runtime.worker import Pass
from penstock.scheduling.placements import Placement

__all__ = ["Reports"]


@dataclass(frozen=True, slots=True)
class Reports:
    """The reports of the process in which the ranks `local` live, which is process `rank`."""

    transport: Transport
    local: Sequence[int]
    rank: int

    def loss(self, current: Pass, placement: Placement, microbatches: range) -> Loss:
        """The loss of a pass over `microbatches`; perhaps on its way."""
        parts = []
        for last in placement.stages[-1]:
            taken = placement.taken_by(last, microbatches)
            form = ("loss", len(taken))
            if not taken:
                continue
            if last in self.local:
                shares = torch.stack([current.losses[last, k] for k in taken])
                for edge in self._edges(last, placement):
                    self.transport.send(edge, form, (shares,))
                parts.append(LossPart(taken, shares))
            else:
                parts.append(LossPart(taken, self.transport.post(Edge(last, self.rank, "reports"), form)))
        return Loss(parts)

    def outputs(self, current: Pass, placement: Placement, microbatches: Sequence[Microbatch]) -> list[list[Tensor]]:
        """The values of the model's output for each microbatch. Waits for them."""
        tickets: dict[int, Ticket] = {}
        for k, microbatch in enumerate(microbatches):
            form = ("output", microbatch.signature)
            last = placement.rank_of(len(placement.stages) - 1, k)
            if last in self.local:
                for edge in self._edges(last, placement):
                    self.transport.send(edge, form, current.outputs[k])
            else:
                tickets[k] = self.transport.post(Edge(last, self.rank, "reports"), form)
        messages = [tickets[k].wait() if k in tickets else current.outputs[k] for k in range(len(microbatches))]
        return [[tensor for tensor in message if tensor is not None] for message in messages]

    def _edges(self, last: int, placement: Placement) -> list[Edge]:
        return [Edge(last, rank, "reports") for rank in range(placement.ranks) if rank not in self.local]
