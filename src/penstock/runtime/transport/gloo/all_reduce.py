"""Sums over a group of processes that speak Gloo, on a thread beside the computation."""

import queue
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.runtime.devices.communicators import Communicator
from penstock.runtime.devices.staging import Staged, Staging
from penstock.runtime.transport.ordered_all_reduce import Agreement, OrderedSum
from penstock.runtime.transport.pending_receives import PendingResult
from penstock.runtime.transport.timeouts import Timeout
from penstock.runtime.transport.transport import Forms, PendingMessage

__all__ = ["GroupSum"]


@dataclass(frozen=True, slots=True)
class _Part:
    form: Hashable
    staged: Staged
    receipt: PendingResult


class GroupSum:
    """The end of `rank`, this process, of the group of ranks `order`, who add in this order. Collective."""

    def __init__(
        self,
        order: Sequence[int],
        group: Communicator,
        rank: int,
        agreement: Agreement,
        staging: Staging,
        timeout: Timeout,
    ) -> None:
        self._place = f"the sum over ranks {list(order)}"
        self._peers = [member for member in order if member != rank]
        self._sum, self._agreement = OrderedSum(order, group, rank), agreement
        self._staging, self._patience = staging, timeout
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"penstock sum {tuple(order)}", daemon=True)
        self._thread.start()

    def agree(self, forms: Forms) -> None:
        """Agrees with the other ranks on what will be added, and waits for them."""
        self._agreement.agree(forms)

    def add(self, form: Hashable, tensor: Tensor) -> PendingMessage:
        """Gives this rank's part; the ticket's message is the sum."""
        receipt = PendingResult(self._place, self._peers, self._patience, self._staging)
        self._parts.put(_Part(form, self._staging.to_host([tensor.detach().contiguous()]), receipt))
        return receipt

    def close(self) -> None:
        """Ends the thread after everything queued has been summed."""
        self._parts.put(None)

    def join(self, seconds: float) -> bool:
        """Waits so long for the end; whether it has come."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._staging.enter_thread()
        while (part := self._parts.get()) is not None:
            try:
                part.receipt.leave(self._answer(part))
            except Exception as error:
                part.receipt.leave(error=error)
            del part

    def _answer(self, part: _Part) -> Staged:
        (own,), there = part.staged
        there.synchronize()
        if not self._agreement.knows(part.form):
            # This thread may wait.
            self._agreement.agree({part.form: (own.numel(), own.dtype)})
        self._agreement.check(part.form, own)
        return self._staging.to_device([self._sum(own)])
