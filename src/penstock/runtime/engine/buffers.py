"""Shares the buffers of a replicated stage.

Buffers (such as BatchNorm's statistics) are not trained: every replica updates its own with its own microbatches, and
BatchNorm does not read them in training. Evaluations and checkpoints must not depend on the replica, so all replicas
copy the buffers of the first one at every drain.
"""

from collections.abc import Mapping

import torch

from penstock.runtime.engine.local_stage import LocalStage
from penstock.runtime.transport.transport import Channel, Edge, Transport
from penstock.scheduling.placements import Placement


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
