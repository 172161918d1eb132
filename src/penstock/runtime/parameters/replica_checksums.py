"""Compares the weights of replicas, which are to have the same bits.

Each replica adds a checksum of every parameter to a sum over the replicas. If all are equal, the sum is the own one
times the number of replicas. A different learning rate, or a write to one replica's weights, would otherwise train
several models that are averaged in silence.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.errors import PenstockError
from penstock.runtime.parameters.weight_versions import VersionedWeights
from penstock.runtime.transport.transport import PendingMessage, Transport

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaChecksums:
    """Compares the `weights` of one stage of `rank` with those of the other replicas, the ranks `group`.

    Parameters that replicas hold shards of are left out.
    """

    def __init__(
        self, transport: Transport, group: tuple[int, ...], rank: int, stage: int, weights: VersionedWeights
    ) -> None:
        self._transport, self._group, self._rank, self._stage, self._weights = transport, group, rank, stage, weights
        self._pending: tuple[tuple[str, ...], Tensor, PendingMessage] | None = None
        self._kind = ("checksums", stage)
        transport.agree(group, rank, {self._kind: (len(self._compared()), torch.int64)})

    def start(self) -> None:
        """Adds the checksums of the newest weights. Every replica does so between the same updates."""
        compared = self._compared()
        if not compared:
            return
        own = torch.stack([_checksum(tensor) for tensor in compared.values()])
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
        return {name: p.detach() for name, p in parameters if p.requires_grad and not isinstance(p, DTensor)}


def _checksum(tensor: Tensor) -> Tensor:
    """The sum of the bits of all elements."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.view(_INTEGERS[plain.element_size()]).sum(dtype=torch.int64)
