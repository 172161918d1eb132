"""An all-reduce that adds in a fixed order, so that the sum has the same bits on all ranks.

Each tensor is cut into as many slices as there are ranks. Each rank receives one slice of every rank's tensor, adds
these in the order of the group, and sends the sum to all. That moves 2 (r - 1) / r of the bytes, as a ring all-reduce
does, but a ring adds each slice in another order. Two ranks swap whole tensors, which moves the same number of bytes in
one round instead of two. Small tensors of more than two ranks are sent whole to all. Over Gloo a thread does all that.

Where each rank needs its share of a sum alone, or has made a share of something, that is one round of messages between
every two ranks.
"""

import queue
import threading
from collections.abc import Hashable, Sequence
from functools import partial, reduce
from itertools import zip_longest

import torch
from torch import Tensor

from penstock.errors import TransportError
from penstock.runtime.collectives.store_gathers import StoreGather
from penstock.runtime.collectives.timeouts import Timeout
from penstock.runtime.devices.communicators import Communicator, coalesce
from penstock.runtime.devices.staging import Staged, Staging
from penstock.runtime.transport.pending_receives import PendingResult
from penstock.runtime.transport.transport import PendingMessage, SumKind, SumKinds
from penstock.torch_internals.distributed import gather_into

WHOLE_BYTES = 2**16
"""Tensors of at most this size are exchanged whole."""


class OrderedSum:
    """Sums over the ranks `order`, which are connected by `group`; this process is `rank`. The order of addition is
    `order`.
    """

    def __init__(self, order: Sequence[int], group: Communicator, rank: int) -> None:
        self._group_ranks = [sorted(order).index(member) for member in order]
        self._own = sorted(order).index(rank)
        self._place = list(order).index(rank)
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

    def of_kind(self, kind: SumKind, own: Tensor) -> Tensor:
        """The sum of the tensors `own`, or what `kind` has a rank receive instead. Collective."""
        if not kind.shares:
            return self(own)
        if own.is_complex():
            doubled = SumKind(0, kind.dtype, tuple(2 * share for share in kind.shares), kind.gathers)
            return torch.view_as_complex(self.of_kind(doubled, torch.view_as_real(own).reshape(-1)).view(-1, 2))
        if kind.gathers:
            gathered = own.new_empty(sum(kind.shares))
            received = torch.split(gathered, list(kind.shares))
            received[self._place].copy_(own)
            self._exchange([own] * len(received), received)
            return gathered
        parts = torch.split(own, list(kind.shares))
        summands = [torch.empty_like(parts[self._place]) for _ in parts]
        summands[self._place] = parts[self._place]
        self._exchange(parts, summands)
        return reduce(torch.add, summands)

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Sends each other rank its tensor of `sent`, and receives that of it into `received`; both in the order."""
        others = [(place, peer) for place, peer in enumerate(self._group_ranks) if place != self._place]
        posted = [partial(self._group.recv, [received[at]], peer, 0) for at, peer in others if received[at].numel()]
        begun = [partial(self._group.send, [sent[at]], peer, 0) for at, peer in others if sent[at].numel()]
        for work in coalesce(self._group, [*posted, *begun]) if posted or begun else ():
            work.wait()

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
    """Checks that the ranks of `gather` sum tensors of the same kinds and sizes. A mismatch would otherwise hang or
    give wrong numbers.
    """

    def __init__(self, gather: StoreGather) -> None:
        self._gather, self.peers = gather, gather.others
        self.context = f"the sum over ranks {list(gather.ranks)}"
        """Names the sum in errors."""
        self._kinds: dict[Hashable, SumKind] = {}

    def agree(self, kinds: SumKinds) -> None:
        """Allows this rank to add tensors of `kinds` from now on. Collective, and blocks until all ranks have called
        it.

        `TransportError` if the ranks differ.
        """
        own = {kind: SumKind(*given) for kind, given in kinds.items()}
        # Of what is gathered, ranks add different numbers.
        mine = [
            (repr(kind), 0 if each.gathers else each.numbers, str(each.dtype), *each.shares)
            for kind, each in own.items()
        ]
        added = self._gather(mine, self.context)
        if any(summands != mine for summands in added):
            raise self._difference([summands if isinstance(summands, list) else [summands] for summands in added])
        self._kinds.update(own)

    def check(self, kind: Hashable, tensor: Tensor) -> SumKind:
        """What has been agreed on for `kind`. Raises `TransportError` if `tensor` differs from it. Does not block."""
        expected, found = self._kinds.get(kind), (tensor.numel(), tensor.dtype)
        if expected is None or expected[:2] != found:
            agreed = "nothing" if expected is None else f"{expected[0]} numbers of {expected[1]}"
            raise TransportError(
                f"{self.context}, {kind!r}: rank {self._gather.rank} adds {found[0]} numbers of {found[1]}, and the "
                f"ranks have agreed on {agreed}. Call agree() with what is to be added before it is, on all of them"
            )
        return expected

    def _difference(self, added: Sequence[Sequence[object]]) -> TransportError:
        """The error for ranks that differ in what they have `added`."""
        rows = zip_longest(*added, fillvalue="nothing")
        first = next(row for row in rows if any(summand != row[0] for summand in row))
        found = sorted(zip(self._gather.ranks, first, strict=True))
        return TransportError(
            f"the replicas on ranks {list(self._gather.ranks)} sum different things "
            f"({', '.join(f'rank {rank}: {summand}' for rank, summand in found)}): expected the same parameters on all "
            "of them. Build the same model on every rank"
        )


class GlooSum:
    """Runs `ordered_sum`, for tensors of the kinds in `agreement`, on a thread. `staging` brings the tensors to the
    host and back.
    """

    def __init__(self, ordered_sum: OrderedSum, agreement: Agreement, staging: Staging, timeout: Timeout) -> None:
        self._sum, self._agreement = ordered_sum, agreement
        self._staging, self._timeout = staging, timeout
        self._summands: queue.SimpleQueue[tuple[Hashable, Staged, PendingResult] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"penstock {agreement.context}", daemon=True)
        self.thread.start()

    def agree(self, kinds: SumKinds) -> None:
        """Agrees with the other ranks on the tensors that will be added. Blocks until all ranks have called it."""
        self._agreement.agree(kinds)

    def add(self, kind: Hashable, tensor: Tensor) -> PendingMessage:
        """Adds this rank's summand. Returns the pending sum."""
        result = PendingResult(self._agreement.context, self._agreement.peers, self._timeout, self._staging)
        self._summands.put((kind, self._staging.to_host([tensor.detach().contiguous()]), result))
        return result

    def join(self, seconds: float) -> bool:
        """Ends the thread after all queued sums. Blocks until it has ended, or for `seconds`. Returns whether it has
        ended.
        """
        self._summands.put(None)
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def _run(self) -> None:
        self._staging.enter_thread()
        while (summand := self._summands.get()) is not None:
            kind, ((own,), ready), result = summand
            try:
                ready.synchronize()
                total = self._sum.of_kind(self._agreement.check(kind, own), own)
                result.complete(self._staging.to_device([total]))
                del total
            except Exception as error:
                result.complete(error=error)
            del summand, own, result
