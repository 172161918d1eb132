"""Sums over a group of processes with a GPU each, over NCCL, on a stream beside the computation."""

from collections.abc import Callable, Hashable, Sequence

import torch.distributed as dist
from torch import Tensor

from penstock.runtime.accelerators import Accelerator
from penstock.runtime.ordered_sums import Agreement, OrderedSum
from penstock.runtime.staging import Staged, Staging
from penstock.runtime.transport import Message, Ticket
from penstock.runtime.watches import Underway

__all__ = ["NcclSum"]


class _Summed:
    """A sum on its way."""

    __slots__ = ("_check", "_message", "_staged", "_staging")

    def __init__(self, staged: Staged, staging: Staging, check: Callable[[], None]) -> None:
        self._staged, self._staging, self._check = staged, staging, check
        self._message: Message | None = None

    def ready(self) -> bool:
        return self._staged[1].query()

    def wait(self) -> Message:
        self._check()
        if self._message is None:
            self._message = tuple(self._staging.follow(self._staged))
        return self._message


class NcclSum:
    """This process's end of the group of ranks `order`, who add in this order, on `accelerator`.

    `check` raises why the group was aborted, if it was.
    """

    def __init__(
        self,
        order: Sequence[int],
        group: dist.ProcessGroup,
        agreement: Agreement,
        accelerator: Accelerator,
        staging: Staging,
        check: Callable[[], None],
    ) -> None:
        self.peers = [rank for rank in order if rank != dist.get_rank()]
        self._sum, self._agreement = OrderedSum(order, group), agreement
        self._accelerator, self._staging, self._check = accelerator, staging, check
        self._stream = accelerator.stream()
        self.underway = Underway()

    def add(self, form: Hashable, tensor: Tensor) -> Ticket:
        """Gives this rank's part; the ticket's message is the sum."""
        own = tensor.detach().contiguous()
        self._agreement.check(form, own)
        accelerator = self._accelerator
        accelerator.wait(self._stream, accelerator.record(accelerator.current()))
        with accelerator.on(self._stream):
            # It was made on the stream of this thread.
            accelerator.keep(own, self._stream)
            staged = self._staging.stay((self._sum(own),))
        self.underway.add(staged[1].query)
        return _Summed(staged, self._staging, self._check)

    def close(self) -> None:
        """What was given will be summed."""

    def join(self, seconds: float) -> bool:
        """Waits so long until everything has been summed; whether it has."""
        return self.underway.finished(seconds)
