"""Gradients of parameters that `fully_shard` has sharded over the replicas: PyTorch sums them, before each update.

FSDP2 (Zhao et al., "PyTorch FSDP", VLDB 2023; here PyTorch's per-parameter `fully_shard`) keeps the full gradients of a
module until a backward for which synchronization is on. That backward sums them over the replicas and leaves each
replica its shard of the sum. Here synchronization is on for the last backward before an update only. FSDP2 would take
the mean over the replicas; ours is a sum of gradients that are weighted already, so its divisor is one.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from penstock.runtime.devices.timestamps import Timestamp
from penstock.runtime.parameters.gradient_buckets import Reducer
from penstock.runtime.transport.transport import Transport


class ShardedReducer(Reducer):
    """A `Reducer` for a stage in which `modules` are fully sharded.

    `parameters`: those of the other modules, which are summed as in any replicated stage.
    """

    def __init__(
        self,
        transport: Transport,
        group: tuple[int, ...],
        rank: int,
        stage: int,
        parameters: Mapping[str, nn.Parameter],
        modules: Sequence[FSDPModule],
        now: Callable[[], Timestamp],
    ) -> None:
        super().__init__(transport, group, rank, stage, parameters, now=now)
        self._plain = frozenset(parameters)
        self._modules = modules
        self._shards: dict[int, dict[str, Tensor]] = {}
        """By version, the local shards of the sums for the update to it."""
        for module in modules:
            module.set_gradient_divide_factor(1.0)
            # Otherwise it scales within the reduction, which Gloo cannot do.
            module.set_force_sum_reduction_for_comms(True)
        self._sum_next(False)

    def arm(self, version: int) -> None:
        self._sum_next(True)
        super().arm(version)

    def disarm(self) -> None:
        self._sum_next(False)
        super().disarm()

    def start(self, version: int, gradients: Mapping[str, Tensor]) -> None:
        self._shards[version] = {name: tensor for name, tensor in gradients.items() if name not in self._plain}
        super().start(version, {name: tensor for name, tensor in gradients.items() if name in self._plain})

    def finish(self, version: int) -> dict[str, Tensor]:
        return {**super().finish(version), **self._shards.pop(version)}

    def _sum_next(self, sums: bool) -> None:
        """Sets whether the coming backward sums over the replicas."""
        for module in self._modules:
            module.set_requires_gradient_sync(sums, recurse=False)
            module.set_is_last_backward(sums)
