"""An all-reduce that adds in a fixed order, so that the sum has the same bits on all ranks.

Each tensor is cut into as many slices as there are ranks. Each rank receives one slice of every rank's tensor, adds
these in the order of the group, and sends the sum to all. That moves 2 (r - 1) / r of the bytes, as a ring all-reduce
does, but a ring adds each slice in another order. Two ranks swap whole tensors, which moves the same number of bytes in
one round instead of two. Small tensors of more than two ranks are sent whole to all ranks.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from penstock.errors import TransportError
from penstock.runtime.devices.communicators import Communicator, coalesce
from penstock.runtime.transport.plain_values import decode_plain, encode_plain
from penstock.runtime.transport.store_watch import WatchedStore
from penstock.runtime.transport.timeouts import Timeout
from penstock.runtime.transport.transport import SumKinds
from penstock.torch_internals.distributed import gather_into

WHOLE_BYTES = 2**16
"""Tensors of at most this size are exchanged whole."""

_SummandSpec: TypeAlias = tuple[str, int, str]
"""One tensor that a rank adds to sums: its kind, its number of elements, and its dtype."""


class OrderedSum:
    """Sums over the ranks `order`, which are connected by `group`; this process is `rank`. The order of addition is
    `order`.
    """

    def __init__(self, order: Sequence[int], group: Communicator, rank: int) -> None:
        self._group_ranks = [sorted(order).index(member) for member in order]
        self._own = sorted(order).index(rank)
        self._group = group

    def __call__(self, own: Tensor) -> Tensor:
        """Returns the sum; `own` is this rank's summand, one-dimensional. Collective.

        Large tensors of more than two ranks are not copied if they can be cut into equal slices.
        """
        if own.is_complex():
            # Neither Gloo nor NCCL has complex dtypes.
            return torch.view_as_complex(self(torch.view_as_real(own).reshape(-1)).view(-1, 2))
        ranks = len(self._group_ranks)
        if ranks == 2:
            return self._swap(own).add_(own)
        if own.numel() * own.element_size() <= WHOLE_BYTES:
            return self._add(self._gather(own, own.new_empty(ranks * own.numel())))
        rest = -own.numel() % ranks
        even = torch.cat([own, own.new_zeros(rest)]) if rest else own
        slices = torch.empty_like(even)
        self._group.alltoall_base(slices, even, [], []).wait()
        mine = self._add(slices)
        # The slices that have been added are overwritten by the sums.
        return self._gather(mine, slices)[: own.numel()]

    def _gather(self, own: Tensor, gathered: Tensor) -> Tensor:
        """Gathers the `own` of all ranks into the memory of `gathered`, by group rank."""
        gather_into(self._group, gathered, own).wait()
        return gathered

    def _swap(self, own: Tensor) -> Tensor:
        """Returns the tensor of the other of two ranks. The sum of two numbers does not depend on their order."""
        other, group, partner = torch.empty_like(own), self._group, 1 - self._own
        # With NCCL both must be one operation. If they followed each other, each rank's send would wait for the other
        # rank's receive, which is queued behind that rank's send. Gloo has no such order, but waits for a receive that
        # is not posted yet: with sends before receives, one direction waited for the other, at half the speed.
        works = coalesce(group, [partial(group.recv, [other], partner, 0), partial(group.send, [own], partner, 0)])
        for work in works:
            work.wait()
        return other

    def _add(self, gathered: Tensor) -> Tensor:
        """Adds all ranks' slices, which lie in `gathered` by group rank."""
        slices = gathered.view(len(self._group_ranks), -1)
        total = slices[self._group_ranks[0]] + slices[self._group_ranks[1]]
        for rank in self._group_ranks[2:]:
            total += slices[rank]
        return total


class Agreement:
    """Checks that the ranks `order` sum tensors of the same kinds and sizes. A mismatch would otherwise hang or give
    wrong numbers.

    Each rank writes what it adds to `store`; this process is `rank`.
    """

    def __init__(self, order: Sequence[int], rank: int, store: Store | WatchedStore, timeout: Timeout) -> None:
        self._order, self._rank, self._store, self._timeout = tuple(order), rank, store, timeout
        self.context = f"the sum over ranks {list(order)}"
        """Names the sum in errors."""
        self.peers = [member for member in order if member != rank]
        self._agreements = 0
        self._sizes: dict[Hashable, tuple[int, torch.dtype]] = {}

    def agree(self, kinds: SumKinds) -> None:
        """Allows this rank to add tensors of `kinds` from now on. Collective, and blocks until all ranks have called
        it.

        `TransportError` if the ranks differ.
        """
        name, self._agreements = f"sum {self._order} {self._agreements}", self._agreements + 1
        mine = [(repr(kind), numbers, str(dtype)) for kind, (numbers, dtype) in kinds.items()]
        keys = [f"{name} {rank}" for rank in self._order]
        try:
            self._store.set(f"{name} {self._rank}", encode_plain(mine).decode())
            self._timeout.wait_for(lambda: self._store.check(keys), self.context, self.peers)
            added = [self._parse(rank, self._store.get(key)) for rank, key in zip(self._order, keys, strict=True)]
        except RuntimeError as error:
            # The store has ended with its process.
            raise self._timeout.connection_error(self.context, self.peers, error) from error
        self._compare(dict(zip(self._order, added, strict=True)))
        self._sizes.update(kinds)

    def covers(self, kind: Hashable) -> bool:
        """Whether `kind` has been agreed on."""
        return kind in self._sizes

    def check(self, kind: Hashable, tensor: Tensor) -> None:
        """Raises `TransportError` if `tensor` differs from what has been agreed on for `kind`. Does not block."""
        expected, found = self._sizes.get(kind), (tensor.numel(), tensor.dtype)
        if expected != found:
            agreed = "nothing" if expected is None else f"{expected[0]} numbers of {expected[1]}"
            raise TransportError(
                f"{self.context}, {kind!r}: rank {self._rank} adds {found[0]} numbers of {found[1]}, and the ranks "
                f"have agreed on {agreed}. Call agree() with what is to be added before it is, on all of them"
            )

    def _parse(self, rank: int, text: bytes) -> list[_SummandSpec]:
        """Reads what `rank` adds. `TransportError` if `text` does not say so."""
        try:
            return [(str(kind), int(numbers), str(dtype)) for kind, numbers, dtype in decode_plain(text)]
        except (ValueError, TypeError) as error:
            raise TransportError(
                f"{self.context}: expected a list of tensors from rank {rank}, found {text[:40]!r}. The ranks run "
                "different versions of Penstock, or another program writes to the store: install the same version "
                "everywhere, and see docs/trust.md"
            ) from error

    def _compare(self, added: Mapping[int, Sequence[_SummandSpec]]) -> None:
        """Raises `TransportError` if the ranks differ in what they add."""
        for summands in zip_longest(*added.values(), fillvalue="nothing"):
            if len(set(summands)) > 1:
                found = dict(zip(added, summands, strict=True))
                shown = ", ".join(f"rank {rank}: {found[rank]}" for rank in sorted(found))
                raise TransportError(
                    f"the replicas on ranks {list(self._order)} sum different things ({shown}): expected the same "
                    "parameters on all of them. Build the same model on every rank"
                )
