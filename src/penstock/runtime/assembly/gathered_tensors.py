"""The tensors of the whole model, brought from the processes that hold them to one process or to all.

Law of this file: tensors come one after the other, in an order that all processes share. So no process holds more than
its own and one other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.arguments import integer
from penstock.capturing.chain import LayerChain
from penstock.runtime.parameters.shards import whole
from penstock.runtime.transport.worlds import World
from penstock.values.plan_stages import Stage


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensors:
    """The tensors of the model's state dict that this process holds, and who answers for each."""

    own: Mapping[str, Tensor]
    every: Mapping[str, Tensor]
    """All entries of the state dict; those that other processes hold have a shape and a type only."""
    owners: Mapping[str, int]
    """The first of the processes that hold each."""
    world: World

    def take(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """All of the tensor in `dtype` on the CPU, if this process answers for it. Those that share it call together.

        It may be the memory of the model itself.
        """
        if name not in self.own:
            return None
        tensor = whole(self.own[name].detach())
        return tensor.to("cpu", dtype) if self.owners[name] == self.world.rank else None

    def bring(self, name: str, dtype: torch.dtype, rank: int | None) -> Tensor | None:
        """The tensor in `dtype` on the CPU of process `rank` (all, if None); None elsewhere. Collective."""
        taken, owner, here = self.take(name, dtype), self.owners[name], self.world.rank
        if self.world.processes == 1 or rank == owner:
            return taken
        if rank is not None and here not in (rank, owner):
            return None
        values = torch.empty(self.every[name].shape, dtype=dtype) if taken is None else taken.contiguous()
        flat, group = values.reshape(-1).view(torch.uint8), self.world.group

        def pass_on() -> None:
            if rank is None:
                dist.broadcast(flat, src=owner, group=group)
            elif here == owner:
                dist.send(flat, dst=rank, group=group)
            else:
                dist.recv(flat, src=owner, group=group)

        peers = [peer for peer in (owner, rank) if peer is not None and peer != here]
        self.world.run(pass_on, f"{name}, from rank {owner} to {'all' if rank is None else f'rank {rank}'}", peers)
        return None if here == owner and rank is not None else values

    def state_dict(self, rank: int | None) -> dict[str, Tensor]:
        """Copies of all tensors on the CPU of process `rank` (all, if None); nothing elsewhere. Collective."""
        processes = self.world.processes
        one = integer(0, processes - 1).but("give the number of a process, or None for all").optional
        rank = one.check("full_state_dict(rank=)", rank)
        found: dict[str, Tensor] = {}
        for names in shared_names(self.every):
            tensor = self.bring(names[0], self.every[names[0]].dtype, rank)
            if tensor is not None:
                copied = tensor.clone() if names[0] in self.own else tensor
                found.update(dict.fromkeys(names, copied))
        return {name: found[name] for name in self.every if name in found}


def held_tensors(chain: LayerChain, stages: Iterable[Stage]) -> dict[str, Tensor]:
    """The entries of the model's state dict that belong to `stages`.

    What no layer uses belongs to the first stage.
    """
    layers = [range(stage.start, stage.stop) for stage in stages]
    tensors: dict[str, Tensor] = {**chain.parameters, **chain.buffers}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if any(reader in span for span in layers for reader in chain.readers[name] or (0,))
    }


def hold(chain: LayerChain, own: Mapping[str, Tensor], world: World) -> HeldTensors:
    """`own`: the entries of the state dict of the model of `chain` that this process holds. Collective."""
    every: dict[str, Tensor] = {**chain.parameters, **chain.buffers}
    owners: dict[str, int] = {}
    for rank, names in enumerate(world.gather(list(own))):
        for name in names:
            owners.setdefault(name, rank)
    return HeldTensors(own, every, owners, world)


def shared_names(tensors: Mapping[str, Tensor]) -> list[Sequence[str]]:
    """The names of each tensor, in the order of the first: tied weights have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())
