"""The transport between the processes of ``torch.distributed``, over whatever carries the messages of each edge."""

import atexit
import os
import sys
import time
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from penstock.runtime.devices.process_hooks import hooks_allowed
from penstock.runtime.transport.endpoints import Endpoints
from penstock.runtime.transport.failures import FailureBoard
from penstock.runtime.transport.gloo.receivers import GlooInbox
from penstock.runtime.transport.nccl.all_reduce import NcclSum
from penstock.runtime.transport.nccl.endpoints import NcclInbox
from penstock.runtime.transport.shared_memory.handshake import Gather
from penstock.runtime.transport.timeouts import POLL_SECONDS, Timeout
from penstock.runtime.transport.transport import ALL, Edge, Forms, PendingMessage

__all__ = ["DistributedTransport"]


class DistributedTransport:
    """Messages between the `ranks` ranks of the default process group, along `edges`, and sums over `groups` of them.

    Collective: every rank of the group must build it with the same edges and groups in the same order. `gather` gives
    every rank what each of them says; `store` is where they met, and nobody else's.
    """

    def __init__(
        self,
        edges: Iterable[Edge],
        rank: int,
        ranks: int,
        device: torch.device,
        store: Store,
        board: FailureBoard,
        timeout_seconds: float,
        gather: Gather,
        groups: Iterable[tuple[int, ...]] = (),
    ) -> None:
        self._patience = Timeout(board, timeout_seconds)
        self._ends = Endpoints(rank, ranks, device, store, self._patience)
        self._ends.connect(tuple(edges), tuple(groups), gather)
        self._outboxes, self._inboxes, self._sums = self._ends.outboxes, self._ends.inboxes, self._ends.sums
        if hooks_allowed():
            atexit.register(self._leave)

    def begin(self) -> None:
        self._ends.notices.begin()

    def ahead(self, edge: Edge) -> int:
        match self._inboxes[edge]:
            case GlooInbox():
                # Its sender asks for what is not posted.
                return 8
            case NcclInbox() if self._ends.notices.careful:
                # It is told of what is on its way, and of nothing else.
                return ALL
            case _:
                # Memory that is shared needs no receive to be written.
                return 1

    def overlaps(self) -> bool:
        return not (self._ends.notices.careful and any(isinstance(made, NcclSum) for made in self._sums.values()))

    def send(self, edge: Edge, form: Hashable, message: Sequence[Tensor | None]) -> None:
        outbox = self._outboxes[edge]
        if outbox.error is not None:
            raise self._patience.broken(str(edge), (edge.target,), outbox.error)
        outbox.put(form, message)

    def post(self, edge: Edge, form: Hashable) -> PendingMessage:
        return self._inboxes[edge].post(form)

    def agree(self, group: tuple[int, ...], rank: int, forms: Forms) -> None:
        self._sums[group].agree(forms)

    def reduce(self, group: tuple[int, ...], rank: int, form: Hashable, tensor: Tensor) -> PendingMessage:
        return self._sums[group].add(form, tensor)

    def check(self) -> None:
        self._ends.watch.check()

    def flush(self) -> None:
        self.check()
        for edge, outbox in self._outboxes.items():
            while not outbox.flushed(POLL_SECONDS):
                self.check()
                self._patience.board.check()
                if outbox.error is not None:
                    raise self._patience.broken(str(edge), (edge.target,), outbox.error)

    def close(self) -> None:
        atexit.unregister(self._leave)
        self._end()

    def _leave(self) -> None:
        """At the end of the process: delivers what was sent, and leaves no thread to the interpreter's ruin.

        A thread that Gloo wakes while the interpreter shuts down aborts the process. One that still waits for a message
        now does so because of a failure, so the process ends here and says so by its exit code.
        """
        if not self._end():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _end(self) -> bool:
        """Ends the threads and the communicators between devices; False if some still wait for a peer."""
        failed = self._patience.board.failed
        deadline = time.monotonic() + (0.5 if failed else 60.0)
        ends = [*self._outboxes.values(), *self._inboxes.values(), *self._sums.values()]
        for end in ends:
            end.close()
        ended = [end.join(max(0.0, deadline - time.monotonic())) for end in ends]
        self._ends.pusher.close()
        if failed or not all(ended) or not self._ends.shut():
            self._ends.watch.abort()
        self._ends.watch.close()
        return all(ended)
