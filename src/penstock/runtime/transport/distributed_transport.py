"""The transport between the processes of ``torch.distributed``: messages and sums over the connections of a process."""

import atexit
import os
import sys
from collections.abc import Hashable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from penstock.runtime.collectives.timeouts import POLL_SECONDS, Timeout
from penstock.runtime.devices.process_hooks import hooks_allowed
from penstock.runtime.transport.connections import Connections
from penstock.runtime.transport.gloo.receivers import GlooInbox
from penstock.runtime.transport.nccl.all_reduce import NcclSum
from penstock.runtime.transport.nccl.endpoints import NcclInbox
from penstock.runtime.transport.nccl.send_notices import SendNotices
from penstock.runtime.transport.shared_memory.local_peers import Gather
from penstock.runtime.transport.transport import ALL_RECEIVES, Edge, PendingMessage, SumKinds


class DistributedTransport:
    """Carries messages between the `ranks` ranks of the default process group, along `edges`, and sums over `groups` of
    them.

    Collective: every rank must build it with the same edges and groups in the same order. `gather` returns what each
    rank passes to it, on every rank. `store` connects the processes; `name` is one that no other transport has.
    """

    def __init__(
        self,
        edges: Iterable[Edge],
        rank: int,
        ranks: int,
        device: torch.device,
        store: Store,
        name: str,
        timeout: Timeout,
        gather: Gather,
        groups: Iterable[tuple[int, ...]] = (),
        mesh_groups: Sequence[dist.ProcessGroup] = (),
        members: Sequence[int] = (),
    ) -> None:
        self._timeout, self._notices = timeout, SendNotices(timeout.board.watch, ranks, f"{name}/", timeout, members)
        self._made = made = Connections(rank, device, store, name, timeout=timeout, notices=self._notices)
        self._outboxes, self._inboxes, self._sums = made.outboxes, made.inboxes, made.sums
        self._watchdog = made.watchdog
        made.connect(tuple(edges), tuple(groups), gather)
        made.watch_groups(mesh_groups)
        self._watchdog.start()
        if hooks_allowed():
            atexit.register(self._leave)

    def begin_segment(self) -> None:
        self._notices.begin_segment()

    def ahead(self, edge: Edge) -> int:
        match self._inboxes[edge]:
            case GlooInbox():
                # A sender must ask the receiver about each message whose receive is not posted.
                return 8
            case NcclInbox() if self._notices.announcing:
                # NCCL is given only receives whose messages are announced, so posting all of them costs nothing.
                return ALL_RECEIVES
            case _:
                # Shared memory accepts a message before its receive is posted. NCCL, after the first steps, is given a
                # receive only when its message is wanted.
                return 1

    def overlaps(self) -> bool:
        return not (self._notices.announcing and any(isinstance(made, NcclSum) for made in self._sums.values()))

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
        self._watchdog.look()

    def flush(self) -> None:
        self._watchdog.check()
        for edge, outbox in self._outboxes.items():
            while not outbox.flushed(POLL_SECONDS):
                self._watchdog.check()
                self._timeout.board.check()
                if outbox.error is not None:
                    raise self._timeout.connection_error(str(edge), (edge.target,), outbox.error)

    def close(self) -> None:
        atexit.unregister(self._leave)
        self._made.end()

    def _leave(self) -> None:
        """Runs at the exit of the process: delivers what was sent, and ends the threads.

        If Gloo woke one of our threads while the interpreter shuts down, the process would abort. If there is one that
        cannot be ended, the process exits here, and the exit handlers that were registered before do not run.
        """
        self._timeout.board.report_last_error()
        self._timeout.board.leave()
        if not self._made.end():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        # Python would end this thread within a call of the store, which aborts the process.
        self._timeout.board.watch.stop()
