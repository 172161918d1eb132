"""A sum over a group of processes that has the same bits on all of them.

The tensors are cut into as many pieces as there are ranks; each rank gets one piece of everybody's, adds them up in the
order of the group, and gives the sum to all. That moves 2 (r - 1) / r of the bytes, as a ring does, and unlike a ring
it adds in one order. Two ranks swap theirs whole, which moves no more and takes one turn less; small tensors of more
ranks go whole to everybody.
"""

import pickle
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from penstock.errors import TransportError
from penstock.runtime.patience import Patience

__all__ = ["Agreement", "OrderedSum"]

WHOLE_BYTES = 2**16
"""Tensors of at most so many bytes are exchanged whole."""


class OrderedSum:
    """Over the ranks `order`, who add in this order, and speak to each other in `group`."""

    def __init__(self, order: Sequence[int], group: dist.ProcessGroup) -> None:
        self._order = tuple(order)
        # A group numbers its ranks in ascending order, whatever order they are given in.
        self._places = [sorted(order).index(member) for member in order]
        self._group = group

    def __call__(self, own: Tensor) -> Tensor:
        """The sum; `own` is this rank's part, a row of numbers. Every rank calls it."""
        ranks = len(self._order)
        if ranks == 2:
            return self._swap(own).add_(own)
        if own.numel() * own.element_size() <= WHOLE_BYTES:
            whole = [torch.empty_like(own) for _ in range(ranks)]
            dist.all_gather(whole, own, group=self._group)
            return self._add([whole[place] for place in self._places])
        size = -(-own.numel() // ranks)
        padded = torch.cat([own, own.new_zeros(size * ranks - own.numel())])
        pieces = torch.empty_like(padded)
        dist.all_to_all_single(pieces, padded, group=self._group)
        mine = self._add([pieces[place * size : (place + 1) * size] for place in self._places])
        sums = torch.empty_like(padded)
        dist.all_gather(list(torch.split(sums, size)), mine, group=self._group)
        return sums[: own.numel()]

    def _swap(self, own: Tensor) -> Tensor:
        """What the other one of two ranks has; two numbers have the same sum in either order."""
        (partner,) = set(self._order) - {dist.get_rank()}
        other = torch.empty_like(own)
        # Together: with NCCL two sends would wait for each other's receives, which come after them.
        both = [
            dist.P2POp(dist.isend, own, partner, self._group),
            dist.P2POp(dist.irecv, other, partner, self._group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return other

    def _add(self, parts: list[Tensor]) -> Tensor:
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total


class Agreement:
    """That all ranks add the same forms of the same sizes; a mismatch would otherwise hang or give garbage.

    Each of the ranks `order` says what it adds in `store` when it first adds a form, and waits for the others.
    """

    def __init__(self, order: Sequence[int], store: Store, patience: Patience) -> None:
        self._order, self._store, self._patience = tuple(order), store, patience
        self._agreed: set[Hashable] = set()

    def check(self, form: Hashable, tensor: Tensor) -> None:
        """Raises `TransportError` if another rank adds something else."""
        if form in self._agreed:
            return
        name = f"sum {self._order} {len(self._agreed)}"
        mine = (repr(form), tensor.numel(), str(tensor.dtype))
        keys = [f"{name} {rank}" for rank in self._order]
        self._store.set(f"{name} {dist.get_rank()}", pickle.dumps(mine).hex())
        others = [rank for rank in self._order if rank != dist.get_rank()]
        place = f"the sum over ranks {list(self._order)}"
        self._patience.wait_for(lambda: self._store.check(keys), place, others)
        found = {
            rank: pickle.loads(bytes.fromhex(self._store.get(key).decode()))
            for rank, key in zip(self._order, keys, strict=True)
        }
        if len(set(found.values())) > 1:
            told = ", ".join(f"rank {rank}: {found[rank]}" for rank in sorted(found))
            raise TransportError(
                f"the replicas on ranks {list(self._order)} sum different things ({told}): expected the same "
                "parameters on all of them. Build the same model on every rank"
            )
        self._agreed.add(form)
