"""The transport between the processes of ``torch.distributed``.

Every directed edge has two ends of its own: through shared memory where its ranks are processes of one host that
compute on CPUs, else over a Gloo communicator. Which of the two is found out when the edges are made, and nobody else
knows. Sums over groups go over Gloo.
"""

import atexit
import os
import sys
import time
from collections.abc import Hashable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.failures import FailureBoard
from penstock.runtime.gloo_inboxes import GlooInbox
from penstock.runtime.gloo_outboxes import GlooOutbox
from penstock.runtime.group_sums import GroupSum
from penstock.runtime.patience import POLL_SECONDS, Patience
from penstock.runtime.rendezvous import Gather, meet
from penstock.runtime.rings import can_share
from penstock.runtime.shared_ends import Pusher, SharedInbox, SharedOutbox
from penstock.runtime.staging import staging_for
from penstock.runtime.tickets import Receipt
from penstock.runtime.transport import Edge, Ticket

__all__ = ["SHARED_MEMORY", "ProcessGroup"]

SHARED_MEMORY = "PENSTOCK_SHARED_MEMORY"
"""The environment variable that, if it is 0, has the processes of one host use Gloo like those of several."""


class ProcessGroup:
    """Messages between the ranks of the default process group, along `edges`, and sums over `groups` of them.

    Collective: every rank of the group must build it with the same edges and groups in the same order. `gather` gives
    every rank what each of them says.
    """

    def __init__(
        self,
        edges: Iterable[Edge],
        rank: int,
        device: torch.device,
        board: FailureBoard,
        timeout_seconds: float,
        gather: Gather,
        groups: Iterable[tuple[int, ...]] = (),
    ) -> None:
        self._patience = Patience(board, timeout_seconds)
        self._seconds = timedelta(seconds=timeout_seconds + 60)
        self._outboxes: dict[Edge, GlooOutbox | SharedOutbox] = {}
        self._inboxes: dict[Edge, GlooInbox | SharedInbox] = {}
        self._pusher = Pusher()
        self._connect(tuple(edges), rank, device, gather)
        # Gloo's sender asks for what is not, and memory that is shared needs no receive to be written.
        self.ahead = 8 if any(isinstance(inbox, GlooInbox) for inbox in self._inboxes.values()) else 1
        self._sums: dict[tuple[int, ...], GroupSum] = {}
        for ranks in groups:
            group = self._communicator(ranks)
            if rank in ranks:
                self._sums[ranks] = GroupSum(ranks, group, staging_for(device))
        atexit.register(self._leave)

    def _connect(self, edges: Sequence[Edge], rank: int, device: torch.device, gather: Gather) -> None:
        willing = can_share() and device.type == "cpu" and os.environ.get(SHARED_MEMORY, "1") != "0"
        peers = {peer for edge in edges for peer in (edge.source, edge.target) if rank in (edge.source, edge.target)}
        met = meet(peers - {rank}, rank, gather, willing)
        near = {edge for edge in edges if rank == edge.source and edge.target in met}
        # A communicator is made by all ranks together, those included that it does not connect.
        shared = {edge for those in gather(near) for edge in those}
        for edge in edges:
            group = None if edge in shared else self._communicator((edge.source, edge.target))
            if edge.source == rank:
                self._outboxes[edge] = (
                    GlooOutbox(edge, group, staging_for(device)) if group else SharedOutbox(edge, met, self._pusher)
                )
            elif edge.target == rank:
                # Reports are read on the host; who wants them on the device puts them there.
                staging = staging_for(torch.device("cpu") if edge.lane == "reports" else device)
                self._inboxes[edge] = (
                    GlooInbox(edge, group, staging, self._patience) if group else SharedInbox(edge, met, self._patience)
                )
        met.part()

    def _communicator(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        made: dist.ProcessGroup = dist.new_group(list(ranks), backend="gloo", timeout=self._seconds)
        return made

    def send(self, edge: Edge, form: Hashable, message: Sequence[Tensor | None]) -> None:
        outbox = self._outboxes[edge]
        if outbox.error is not None:
            raise self._patience.broken(str(edge), (edge.target,), outbox.error)
        outbox.put(form, message)

    def post(self, edge: Edge, form: Hashable) -> Ticket:
        return self._inboxes[edge].post(form)

    def reduce(self, group: tuple[int, ...], rank: int, form: Hashable, tensor: Tensor) -> Ticket:
        others = [other for other in group if other != rank]
        summing = self._sums[group]
        receipt = Receipt(f"the sum over ranks {list(group)}", others, self._patience, summing.staging)
        summing.put(form, tensor, receipt)
        return receipt

    def flush(self) -> None:
        for edge, outbox in self._outboxes.items():
            while not outbox.flushed(POLL_SECONDS):
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
        """Ends the threads; False if some still wait for a peer."""
        deadline = time.monotonic() + (0.5 if self._patience.board.failed else 60.0)
        ends = [*self._outboxes.values(), *self._inboxes.values(), *self._sums.values()]
        for end in ends:
            end.close()
        ended = [end.join(max(0.0, deadline - time.monotonic())) for end in ends]
        self._pusher.close()
        return all(ended)
