"""A sum over a group of processes that has the same bits on all of them.

The tensors are cut into as many pieces as there are ranks; each rank gets one piece of everybody's, adds them up in the
order of the group, and gives the sum to all. That moves 2 (r - 1) / r of the bytes, as a ring does, and unlike a ring
it adds in one order. Two ranks swap theirs whole, which moves no more and takes one turn less; small tensors of more
ranks go whole to everybody.
"""

import pickle
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from penstock.errors import TransportError
from penstock.runtime.devices.communicators import Communicator, together
from penstock.runtime.transport.timeouts import Timeout
from penstock.runtime.transport.transport import Forms
from penstock.torch_internals.distributed import gather_into

__all__ = ["WHOLE_BYTES", "Agreement", "OrderedSum"]

WHOLE_BYTES = 2**16
"""Tensors of at most so many bytes are exchanged whole."""

_Part: TypeAlias = tuple[str, int, str]
"""What a rank gives to a sum: the form, how many numbers, and their type."""


class OrderedSum:
    """Over the ranks `order`, who add in this order, and speak to each other in `group`; this process is `rank`."""

    def __init__(self, order: Sequence[int], group: Communicator, rank: int) -> None:
        self._places = [sorted(order).index(member) for member in order]
        self._own = sorted(order).index(rank)
        self._group = group

    def __call__(self, own: Tensor) -> Tensor:
        """The sum; `own` is this rank's part, a row of numbers. Every rank calls it.

        Of more than two ranks' large parts no copy is made if they can be cut into equal pieces.
        """
        if own.is_complex():
            # Neither Gloo nor NCCL knows such numbers.
            return torch.view_as_complex(self(torch.view_as_real(own).reshape(-1)).view(-1, 2))
        ranks = len(self._places)
        if ranks == 2:
            return self._swap(own).add_(own)
        if own.numel() * own.element_size() <= WHOLE_BYTES:
            return self._add(self._gather(own, own.new_empty(ranks * own.numel())))
        rest = -own.numel() % ranks
        even = torch.cat([own, own.new_zeros(rest)]) if rest else own
        pieces = torch.empty_like(even)
        self._group.alltoall_base(pieces, even, [], []).wait()
        mine = self._add(pieces)
        # What has been added up makes room for the sums.
        return self._gather(mine, pieces)[: own.numel()]

    def _gather(self, own: Tensor, every: Tensor) -> Tensor:
        """Everybody's `own`, by their places, in the memory of `every`."""
        gather_into(self._group, every, own).wait()
        return every

    def _swap(self, own: Tensor) -> Tensor:
        """What the other one of two ranks has; two numbers have the same sum in either order."""
        other, group, partner = torch.empty_like(own), self._group, 1 - self._own
        # With NCCL both must be one operation: of two that follow each other, each rank's send would wait for the
        # other one's receive, which comes behind a send. Gloo has no such order.
        works = together(group, [partial(group.send, [own], partner, 0), partial(group.recv, [other], partner, 0)])
        for work in works:
            work.wait()
        return other

    def _add(self, every: Tensor) -> Tensor:
        """The sum of everybody's parts of `every`, which lie there by their places."""
        parts = every.view(len(self._places), -1)
        total = parts[self._places[0]] + parts[self._places[1]]
        for place in self._places[2:]:
            total += parts[place]
        return total


class Agreement:
    """That the ranks `order`, of which this process is `rank`, add the same forms of the same sizes; a mismatch would
    otherwise hang or give garbage. Each says what it adds in `store`.
    """

    def __init__(self, order: Sequence[int], rank: int, store: Store, timeout: Timeout) -> None:
        self._order, self._rank, self._store, self._patience = tuple(order), rank, store, timeout
        self._place = f"the sum over ranks {list(order)}"
        self._agreements = 0
        self._sizes: dict[Hashable, tuple[int, torch.dtype]] = {}

    def agree(self, forms: Forms) -> None:
        """From now on this rank may add `forms`. Collective, and waits for the other ranks.

        Raises `TransportError` if one of them adds something else.
        """
        name, self._agreements = f"sum {self._order} {self._agreements}", self._agreements + 1
        mine = [(repr(form), numbers, str(dtype)) for form, (numbers, dtype) in forms.items()]
        keys = [f"{name} {rank}" for rank in self._order]
        others = [rank for rank in self._order if rank != self._rank]
        try:
            self._store.set(f"{name} {self._rank}", pickle.dumps(mine).hex())
            self._patience.wait_for(lambda: self._store.check(keys), self._place, others)
            told = [pickle.loads(bytes.fromhex(self._store.get(key).decode())) for key in keys]
        except RuntimeError as error:
            # The store has gone with its process.
            raise self._patience.broken(self._place, others, error) from error
        self._compare(dict(zip(self._order, told, strict=True)))
        self._sizes.update(forms)

    def knows(self, form: Hashable) -> bool:
        """Whether there is an agreement on `form`."""
        return form in self._sizes

    def check(self, form: Hashable, tensor: Tensor) -> None:
        """Raises `TransportError` if `tensor` is not what has been agreed on for `form`. Waits for nobody."""
        expected, found = self._sizes.get(form), (tensor.numel(), tensor.dtype)
        if expected != found:
            agreed = "nothing" if expected is None else f"{expected[0]} numbers of {expected[1]}"
            raise TransportError(
                f"{self._place}, {form!r}: rank {self._rank} adds {found[0]} numbers of {found[1]}, and the ranks have "
                f"agreed on {agreed}. Call agree() with what is to be added before it is, on all of them"
            )

    def _compare(self, told: Mapping[int, Sequence[_Part]]) -> None:
        """Raises `TransportError` if not all ranks have `told` the same."""
        for parts in zip_longest(*told.values(), fillvalue="nothing"):
            if len(set(parts)) > 1:
                found = dict(zip(told, parts, strict=True))
                shown = ", ".join(f"rank {rank}: {found[rank]}" for rank in sorted(found))
                raise TransportError(
                    f"the replicas on ranks {list(self._order)} sum different things ({shown}): expected the same "
                    "parameters on all of them. Build the same model on every rank"
                )
