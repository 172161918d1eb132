"""Sums over a group of processes, the same bits on all of them, on a thread beside the computation.

The tensors are cut into as many pieces as there are ranks; each rank gets one piece of everybody's, adds them up in the
order of the group, and gives the sum to all. That moves 2 (r - 1) / r of the bytes, as a ring does, and unlike a ring
it adds in one order. Two ranks swap theirs whole, which moves no more and takes one turn less; small tensors of more
ranks go whole to everybody.
"""

import pickle
import queue
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import TransportError
from penstock.runtime.staging import NOTHING, Staged, Staging

__all__ = ["GroupSum", "Receipt"]

WHOLE_BYTES = 2**16
"""Tensors of at most so many bytes are exchanged whole."""


class Receipt(Protocol):
    """Where the sum is left."""

    def leave(self, staged: Staged = NOTHING, error: Exception | None = None) -> None:
        """Called once, with the sum or why there will be none."""


@dataclass(frozen=True, slots=True)
class _Part:
    form: Hashable
    staged: Staged
    receipt: Receipt


class GroupSum:
    """This process's end of the group of ranks `order`, who add in this order. Collective."""

    def __init__(self, order: tuple[int, ...], group: dist.ProcessGroup, staging: Staging) -> None:
        self._order = order
        # A group numbers its ranks in ascending order, whatever order they are given in.
        self._places = [sorted(order).index(member) for member in order]
        self._group = group
        self.staging = staging
        self._agreed: set[Hashable] = set()
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"penstock sum {order}", daemon=True)
        self._thread.start()

    def put(self, form: Hashable, tensor: Tensor, receipt: Receipt) -> None:
        """Queues this rank's part."""
        self._parts.put(_Part(form, self.staging.to_host([tensor.detach().contiguous()]), receipt))

    def close(self) -> None:
        """Ends the thread after everything queued has been summed."""
        self._parts.put(None)

    def join(self, seconds: float) -> bool:
        """Waits so long for the end; whether it has come."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (part := self._parts.get()) is not None:
            try:
                part.receipt.leave(self._answer(part))
            except Exception as error:
                part.receipt.leave(error=error)
            del part

    def _answer(self, part: _Part) -> Staged:
        (own,), there = part.staged
        there.synchronize()
        return self.staging.to_device([self._sum(part.form, own)])

    def _sum(self, form: Hashable, own: Tensor) -> Tensor:
        if form not in self._agreed:
            self._agree(form, own)
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
        works = dist.isend(own, partner, self._group), dist.irecv(other, partner, self._group)
        for work in works:
            assert work is not None
            work.wait()
        return other

    def _add(self, parts: list[Tensor]) -> Tensor:
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total

    def _agree(self, form: Hashable, tensor: Tensor) -> None:
        """Makes sure that all ranks add the same form and size; a mismatch would otherwise hang or give garbage."""
        mine = (repr(form), tensor.numel(), str(tensor.dtype))
        found = _exchange(mine, self._group, len(self._order))
        if len(set(found)) > 1:
            told = ", ".join(f"rank {rank}: {what}" for rank, what in zip(sorted(self._order), found, strict=True))
            raise TransportError(
                f"the replicas on ranks {list(self._order)} sum different things ({told}): expected the same "
                "parameters on all of them. Build the same model on every rank"
            )
        self._agreed.add(form)


def _exchange(mine: tuple[str, int, str], group: dist.ProcessGroup, ranks: int) -> list[tuple[str, int, str]]:
    """What every rank says, by rank in the group."""
    text = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([text.numel()]), group=group)
    most = int(max(sizes))
    padded = torch.cat([text, text.new_zeros(most - text.numel())])
    texts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(texts, padded, group=group)
    return [pickle.loads(found.numpy().tobytes()[: int(size)]) for found, size in zip(texts, sizes, strict=True)]
