"""Sums over a group of processes with a GPU each, over NCCL, on a stream beside the computation.

Laws of this file:
  1. `add` waits for nobody: hooks call it within a backward, and whoever would be waited for may itself wait for what
     this backward makes. What must be waited for on the host is done before training.
  2. NCCL connects ranks when they first need a connection, each waiting on the host for the others; which ones it needs
     depends on the operation and on its size. So every operation that training needs is done once before it.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from penstock.runtime.devices.accelerators import Accelerator
from penstock.runtime.devices.communicators import Communicator
from penstock.runtime.devices.staging import Staged, Staging
from penstock.runtime.transport.nccl.watchdog import PendingWork
from penstock.runtime.transport.ordered_all_reduce import WHOLE_BYTES, Agreement, OrderedSum
from penstock.runtime.transport.transport import Forms, Message, PendingMessage

__all__ = ["NcclSum"]


class _Summed:
    """A sum on its way."""

    __slots__ = ("_hold", "_message", "_staged", "_staging")

    def __init__(self, staged: Staged, staging: Staging, hold: Callable[[Callable[[], bool]], None]) -> None:
        self._staged, self._staging, self._hold = staged, staging, hold
        self._message: Message | None = None

    def ready(self) -> bool:
        return self._staged[1].query()

    def wait(self) -> Message:
        self._hold(self.ready)
        if self._message is None:
            self._message = tuple(self._staging.follow(self._staged))
        return self._message


class NcclSum:
    """The end of `rank`, this process, of the group of ranks `order`, who add in this order, on `device`.

    `accelerator`: that device. `check` raises why the group was aborted, if it was. `hold` does so, too, and in the
    first steps waits for what it is told of.
    """

    def __init__(
        self,
        order: Sequence[int],
        group: Communicator,
        rank: int,
        agreement: Agreement,
        device: torch.device,
        accelerator: Accelerator,
        staging: Staging,
        check: Callable[[], None],
        hold: Callable[[Callable[[], bool]], None],
    ) -> None:
        self.peers = [member for member in order if member != rank]
        self._sum, self._agreement = OrderedSum(order, group, rank), agreement
        self._device, self._accelerator, self._staging = device, accelerator, staging
        self._check, self._hold = check, hold
        self._stream = accelerator.stream()
        self.underway = PendingWork()

    def meet(self) -> None:
        """Connects this rank with the others, for small tensors and for large ones. Collective, and waits for them."""
        self._rehearse(1, torch.float32)
        self._rehearse(WHOLE_BYTES // torch.float32.itemsize + len(self.peers) + 1, torch.float32)

    def agree(self, forms: Forms) -> None:
        """Agrees with the other ranks on what will be added, and waits for them."""
        self._agreement.agree(forms)
        for numbers, dtype in dict.fromkeys(forms.values()):
            self._rehearse(numbers, dtype)

    def add(self, form: Hashable, tensor: Tensor) -> PendingMessage:
        """Gives this rank's part; the ticket's message is the sum."""
        own = tensor.detach().contiguous()
        self._agreement.check(form, own)
        return _Summed(self._begin(own), self._staging, self._hold)

    def close(self) -> None:
        """What was given will be summed."""

    def join(self, seconds: float) -> bool:
        """Waits so long until everything has been summed; whether it has."""
        return self.underway.finished(seconds)

    def _begin(self, own: Tensor) -> Staged:
        accelerator = self._accelerator
        accelerator.wait(self._stream, accelerator.record(accelerator.current()))
        with accelerator.on(self._stream):
            # It was made on the stream of this thread.
            accelerator.keep(own, self._stream)
            staged = self._staging.stay((self._sum(own),))
        self.underway.add(staged[1].query)
        return staged

    def _rehearse(self, numbers: int, dtype: torch.dtype) -> None:
        """Adds zeros, and waits until that is done: many of them at once would take much memory."""
        _, there = self._begin(torch.zeros(numbers, dtype=dtype, device=self._device))
        there.synchronize()
        self._check()
