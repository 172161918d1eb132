"""The state and the tools that a rank holds for one stage, and the buffers that replicas of a stage share.

Buffers (such as BatchNorm's statistics) are not trained: every replica updates its own with its own microbatches, and
BatchNorm does not read them in training. Evaluations and checkpoints must not depend on the replica, so all replicas
copy the buffers of the first one at every drain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.runtime.devices.streams import UpdateOrder
from penstock.runtime.execution.executor import StageExecutor
from penstock.runtime.execution.recomputation import Granularity
from penstock.runtime.parameters.gradient_buckets import Reducer
from penstock.runtime.parameters.weight_versions import VersionedWeights
from penstock.runtime.transport.transport import Channel, Edge, Transport
from penstock.scheduling.placements import Placement


@dataclass(slots=True, eq=False)
class LocalStage:
    """Holds the weights of one stage, and the objects that run its forwards and backwards."""

    weights: VersionedWeights
    evaluation: Callable[[], Callable[[Sequence[Tensor], Mapping[str, Tensor]], tuple[Tensor, ...]]]
    """Returns the stage in evaluation mode over the newest weights. The first call captures it."""
    ties: Mapping[int, tuple[str, ...]]
    """For every stage that shares weights with this one, the names of these weights."""
    reducer: Reducer | None = None
    """Sums gradients over the replicas of the stage; None if it has no other replica."""
    recomputes: Granularity | None = None
    """Whether a backward recomputes what it needs, and for how many layers at a time."""
    order: UpdateOrder | None = None
    """Orders its updates and the computations that read its weights, on a device that runs them concurrently."""
    executor: StageExecutor = field(default_factory=StageExecutor)

    def discard(self) -> None:
        """Drops the microbatches in flight and their gradients."""
        self.executor.in_flight.clear()
        if self.reducer is not None:
            self.reducer.discard()
        self.weights.discard()


def share_buffers(stages: Mapping[int, Mapping[int, LocalStage]], placement: Placement, transport: Transport) -> None:
    """Copies the buffers of the first replica of each stage to the others. Collective over the replicas.

    `stages`: those of this process, by rank and stage.
    """
    held = [
        (rank, index, stage.weights.buffers, placement.stages[index])
        for rank, own in stages.items()
        for index, stage in own.items()
    ]
    replicated = [(rank, index, buffers, ranks) for rank, index, buffers, ranks in held if len(ranks) > 1 and buffers]
    for rank, index, buffers, ranks in replicated:
        if rank == ranks[0]:
            for other in ranks[1:]:
                edge = Edge(rank, other, Channel.BUFFERS)
                # Copies, since training goes on to write the buffers.
                transport.send(edge, ("buffers", index), [buffer.detach().clone() for buffer in buffers])
    for rank, index, buffers, ranks in replicated:
        if rank != ranks[0]:
            message = transport.post(Edge(ranks[0], rank, Channel.BUFFERS), ("buffers", index)).wait()
            with torch.no_grad():
                for buffer, found in zip(buffers, message, strict=True):
                    assert found is not None
                    buffer.copy_(found)
