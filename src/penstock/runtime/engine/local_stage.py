"""The state and the tools that a rank holds for one stage, and what replicas of a stage have in common.

Buffers (such as BatchNorm's statistics) are not trained: every replica updates its own with its own microbatches, and
BatchNorm does not read them in training. Evaluations and checkpoints must not depend on the replica, so all replicas
copy the buffers of the first one at every drain.

Weights of replicas are to have the same bits, and are compared. A different learning rate, or a write to one replica's
weights, would otherwise train several models that are averaged in silence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.runtime.devices.streams import UpdateOrder
from penstock.runtime.execution.executor import StageExecutor
from penstock.runtime.execution.recomputation import Granularity
from penstock.runtime.parameters.gradient_buckets import Reducer
from penstock.runtime.parameters.residence import Residence
from penstock.runtime.parameters.weight_shares import WeightShares
from penstock.runtime.parameters.weight_versions import VersionedWeights
from penstock.runtime.transport.transport import Channel, Edge, PendingMessage, Transport
from penstock.scheduling.placements import Placement
from penstock.torch_internals.unimported import is_dtensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True, eq=False)
class LocalStage:
    """Holds the weights of one stage, and the objects that run its forwards and backwards."""

    weights: VersionedWeights
    evaluation: Callable[[], Callable[[Sequence[Tensor], Mapping[str, Tensor]], tuple[Tensor, ...]]]
    """Returns the stage for the evaluation mode over the newest weights. The first call captures it."""
    ties: Mapping[int, tuple[str, ...]]
    """For every stage that shares weights with this one, the names of these weights."""
    reducer: Reducer | None = None
    """Sums gradients over the replicas of the stage; None if it has no other replica."""
    shares: WeightShares | None = None
    """Where replicas in other processes update a part of the parameters each."""
    recomputes: Granularity | None = None
    """Whether a backward recomputes what it needs, and for how many layers at a time."""
    order: UpdateOrder | None = None
    """Orders its updates and the computations that read its weights, on a device that runs them concurrently."""
    residence: Residence | None = None
    """Where its weights and gradients are, if it is streamed."""
    executor: StageExecutor = field(default_factory=StageExecutor)


LocalStages: TypeAlias = Mapping[int, Mapping[int, LocalStage]]
"""The stages of this process, by rank and index."""


def parameters_of(stages: LocalStages) -> dict[str, nn.Parameter]:
    """The parameters of `stages`, each once, in the order of the layers."""
    by_index = {index: stage for own in stages.values() for index, stage in own.items()}
    return {name: p for index in sorted(by_index) for name, p in by_index[index].weights.parameters.items()}


def share_buffers(stages: LocalStages, placement: Placement, transport: Transport) -> None:
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


class ReplicaChecksums:
    """Compares the `weights` of one stage of `rank` with those of the other replicas, the ranks `group`, on `device`.

    Each replica adds a checksum of every parameter to a sum over the replicas. If all are equal, the sum is the own one
    times the number of replicas. Parameters that replicas hold shards of are left out.
    """

    def __init__(
        self,
        transport: Transport,
        group: tuple[int, ...],
        rank: int,
        *,
        stage: int,
        weights: VersionedWeights,
        device: torch.device,
    ) -> None:
        self._transport, self._group, self._rank, self._stage, self._weights = transport, group, rank, stage, weights
        self._device = device
        self._pending: tuple[tuple[str, ...], Tensor, PendingMessage] | None = None
        self._kind = ("checksums", stage)
        transport.agree(group, rank, {self._kind: (len(self._compared()), torch.int64)})

    def start(self) -> None:
        """Adds the checksums of the newest weights. Every replica does so between the same updates."""
        compared = self._compared()
        if not compared:
            return
        own = torch.stack([_checksum(tensor) for tensor in compared.values()]).to(self._device)
        self._pending = tuple(compared), own, self._transport.reduce(self._group, self._rank, self._kind, own.clone())

    def finish(self) -> None:
        """Waits for the other replicas. Raises `PenstockError` if their weights differ."""
        if self._pending is None:
            return
        (compared, own, sums), self._pending = self._pending, None
        (total,) = sums.wait()
        assert total is not None
        expected = (own * len(self._group)).tolist()
        pairs = zip(compared, expected, total.tolist(), strict=True)
        if other := [name for name, own_sum, found in pairs if own_sum != found]:
            rest = f" and {len(other) - 3} more" if len(other) > 3 else ""
            raise PenstockError(
                f"the replicas of stage {self._stage} on ranks {list(self._group)} have different weights: "
                f"{', '.join(other[:3])}{rest}. Expected the same bits on all of them. Found by rank {self._rank}. Do "
                "not write to weights or change options of an optimizer on one rank alone, and make hooks and "
                "optimizers deterministic"
            )

    def _compared(self) -> dict[str, Tensor]:
        parameters = self._weights.parameters.items()
        return {name: p.detach() for name, p in parameters if p.requires_grad and not is_dtensor(p)}


def _checksum(tensor: Tensor) -> Tensor:
    """The sum of the bits of all elements."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.view(_INTEGERS[plain.element_size()]).sum(dtype=torch.int64)
