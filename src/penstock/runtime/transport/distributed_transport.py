"""The transport between the processes of ``torch.distributed``, over the selected backend of each edge."""

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
from penstock.runtime.transport.run_keys import RunKey
from penstock.runtime.transport.shared_memory.handshake import Gather
from penstock.runtime.transport.store_watch import WatchedStore
from penstock.runtime.transport.timeouts import POLL_SECONDS, Timeout
from penstock.runtime.transport.transport import ALL_RECEIVES, Edge, PendingMessage, SumKinds

_WAKE_SECONDS = 2.0
"""How long a thread may take to end whose connection is broken."""


class DistributedTransport:
    """Carries messages between the `ranks` ranks of the default process group, along `edges`, and sums over `groups` of
    them.

    Collective: every rank must build it with the same edges and groups in the same order. `gather` returns what each
    rank passes to it, on every rank. `store` and `notes` connect the processes, and are used for nothing else. `key`:
    that of the run.
    """

    def __init__(
        self,
        edges: Iterable[Edge],
        rank: int,
        ranks: int,
        device: torch.device,
        store: Store,
        notes: WatchedStore,
        board: FailureBoard,
        timeout_seconds: float,
        gather: Gather,
        groups: Iterable[tuple[int, ...]] = (),
        *,
        key: RunKey,
    ) -> None:
        self._timeout = Timeout(board, timeout_seconds)
        self._endpoints = Endpoints(rank, ranks, device, store, timeout=self._timeout, notes=notes)
        self._endpoints.connect(tuple(edges), tuple(groups), gather, key)
        self._outboxes, self._inboxes = self._endpoints.outboxes, self._endpoints.inboxes
        self._sums = self._endpoints.sums
        if hooks_allowed():
            atexit.register(self._leave)

    def begin_segment(self) -> None:
        self._endpoints.notices.begin_segment()

    def ahead(self, edge: Edge) -> int:
        match self._inboxes[edge]:
            case GlooInbox():
                # A sender must ask the receiver about each message whose receive is not posted.
                return 8
            case NcclInbox() if self._endpoints.notices.announcing:
                # NCCL is given only receives whose messages are announced, so posting all of them costs nothing.
                return ALL_RECEIVES
            case _:
                # Shared memory accepts a message before its receive is posted. NCCL, after the first steps, is given a
                # receive only when its message is wanted.
                return 1

    def overlaps(self) -> bool:
        first_steps = self._endpoints.notices.announcing
        return not (first_steps and any(isinstance(made, NcclSum) for made in self._sums.values()))

    def send(self, edge: Edge, kind: Hashable, message: Sequence[Tensor | None]) -> None:
        outbox = self._outboxes[edge]
        if outbox.error is not None:
            raise self._timeout.connection_error(str(edge), (edge.target,), outbox.error)
        outbox.put(kind, message)

    def post(self, edge: Edge, kind: Hashable) -> PendingMessage:
        return self._inboxes[edge].post(kind)

    def agree(self, group: tuple[int, ...], rank: int, kinds: SumKinds) -> None:
        self._sums[group].agree(kinds)

    def reduce(self, group: tuple[int, ...], rank: int, kind: Hashable, tensor: Tensor) -> PendingMessage:
        return self._sums[group].add(kind, tensor)

    def check(self) -> None:
        self._endpoints.watchdog.look()

    def flush(self) -> None:
        self._endpoints.watchdog.check()
        for edge, outbox in self._outboxes.items():
            while not outbox.flushed(POLL_SECONDS):
                self._endpoints.watchdog.check()
                self._timeout.board.check()
                if outbox.error is not None:
                    raise self._timeout.connection_error(str(edge), (edge.target,), outbox.error)

    def close(self) -> None:
        atexit.unregister(self._leave)
        self._end()

    def _leave(self) -> None:
        """Runs at the exit of the process: delivers what was sent, and ends the threads.

        If Gloo woke one of our threads while the interpreter shuts down, the process would abort. If there is one that
        cannot be ended, the process exits here, and the exit handlers that were registered before do not run.
        """
        self._timeout.board.report_last_error()
        self._timeout.board.leave()
        if not self._end():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        # Python would end this thread within a call of the store, which aborts the process.
        self._timeout.board.watch.stop()

    def _end(self) -> bool:
        """Ends the threads and the communicators between devices. Returns False if a thread cannot be ended."""
        failed = self._timeout.board.failed
        deadline = time.monotonic() + (0.5 if failed else 60.0)
        endpoints = [*self._outboxes.values(), *self._inboxes.values(), *self._sums.values()]
        for endpoint in endpoints:
            endpoint.close()
        ended = [endpoint.join(max(0.0, deadline - time.monotonic())) for endpoint in endpoints]
        if not all(ended):
            # A thread that still waits for a message does so because of a failure.
            self._endpoints.break_connections(_WAKE_SECONDS)
        self._endpoints.flusher.close()
        if failed or not all(ended) or not self._endpoints.shutdown():
            self._endpoints.watchdog.abort()
        self._endpoints.watchdog.close()
        if self._endpoints.threads():
            return False
        # A communicator between devices that did not end would be waited for when it is dropped.
        if all(ended) or self._endpoints.accelerator is None:
            self._endpoints.release()
        return True
