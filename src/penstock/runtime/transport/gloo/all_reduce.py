"""Sums over a group of processes that are connected by Gloo, on a thread beside the computation."""

import queue
import threading
from collections.abc import Hashable

from torch import Tensor

from penstock.runtime.collectives.timeouts import Timeout
from penstock.runtime.devices.staging import Staged, Staging
from penstock.runtime.transport.ordered_all_reduce import Agreement, OrderedSum
from penstock.runtime.transport.pending_receives import PendingResult
from penstock.runtime.transport.transport import PendingMessage, SumKinds


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
                self._agreement.check(kind, own)
                result.complete(self._staging.to_device([self._sum(own)]))
            except Exception as error:
                result.complete(error=error)
            del summand, own, result
