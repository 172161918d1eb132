"""Sums over a group of processes with one GPU each, over NCCL, on a stream beside the computation.

Invariants of this file:
  1. `add` does not block. Hooks call it within a backward, and another rank that it would wait for may itself wait for
     the results of this backward. Everything that must block the host is done before training.
  2. NCCL connects two ranks when they first need the connection, and blocks both hosts meanwhile. Which connections are
     needed depends on the operation and its size. So every operation that training needs is run once before it.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from penstock.runtime.devices.accelerators import Accelerator
from penstock.runtime.devices.staging import Staged, Staging
from penstock.runtime.transport.nccl.watchdog import PendingWork
from penstock.runtime.transport.ordered_all_reduce import WHOLE_BYTES, Agreement, OrderedSum
from penstock.runtime.transport.transport import Message, PendingMessage, SumKind, SumKinds


class _PendingSum:
    """A sum that has been started."""

    __slots__ = ("_hold", "_message", "_staged", "_staging")

    def __init__(self, staged: Staged, staging: Staging, hold: Callable[[Callable[[], bool]], None]) -> None:
        self._staged, self._staging, self._hold = staged, staging, hold
        self._message: Message | None = None

    def ready(self) -> bool:
        return self._staged[1].query()

    def wait(self) -> Message:
        self._hold(self.ready)
        if self._message is None:
            self._message = tuple(self._staging.wait_for(self._staged))
        return self._message


class NcclSum:
    """The end of this process, `rank`, of sums over the ranks `order`, which is also the order of addition, on
    `device`.

    `accelerator`: that device. `check` raises if the group was aborted. `hold` does so too, and in the first steps
    blocks until the condition that it is passed holds.
    """

    waits_between_steps = False

    def __init__(
        self,
        ordered_sum: OrderedSum,
        agreement: Agreement,
        device: torch.device,
        accelerator: Accelerator,
        staging: Staging,
        check: Callable[[], None],
        hold: Callable[[Callable[[], bool]], None],
    ) -> None:
        self.peers = agreement.peers
        self._sum, self._agreement = ordered_sum, agreement
        self._device, self._accelerator, self._staging = device, accelerator, staging
        self._check, self._hold = check, hold
        self._stream = accelerator.stream()
        self.pending = PendingWork()

    def rehearse(self) -> None:
        """Connects this rank with the others, for small tensors and for large ones. Collective, and blocks."""
        self._sum_zeros(SumKind(1, torch.float32))
        self._sum_zeros(SumKind(WHOLE_BYTES // torch.float32.itemsize + len(self.peers) + 1, torch.float32))

    def agree(self, kinds: SumKinds) -> None:
        """Agrees with the other ranks on the tensors that will be added. Blocks until all ranks have called it."""
        self._agreement.agree(kinds)
        for given in dict.fromkeys(kinds.values()):
            self._sum_zeros(SumKind(*given))

    def add(self, kind: Hashable, tensor: Tensor) -> PendingMessage:
        """Adds this rank's summand. Returns the pending sum at once."""
        own = tensor.detach().contiguous()
        return _PendingSum(self._start(self._agreement.check(kind, own), own), self._staging, self._hold)

    def join(self, seconds: float) -> bool:
        """Blocks until all sums are done, or for `seconds`. Returns whether they are done."""
        return self.pending.wait(seconds)

    def _start(self, kind: SumKind, own: Tensor) -> Staged:
        accelerator = self._accelerator
        accelerator.wait(self._stream, accelerator.record_event(accelerator.current()))
        with accelerator.on(self._stream):
            # The tensor was made on this thread's stream.
            accelerator.record_stream(own, self._stream)
            staged = self._staging.in_place((self._sum.of_kind(kind, own),))
        self.pending.add(staged[1].query)
        return staged

    def _sum_zeros(self, kind: SumKind) -> None:
        """Sums zeros, and waits for the result: many such sums at once would take much memory."""
        _, ready = self._start(kind, torch.zeros(kind.numbers, dtype=kind.dtype, device=self._device))
        ready.synchronize()
        self._check()
