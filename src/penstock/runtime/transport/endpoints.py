"""Makes this process's ends of all edges and sums, together with the other processes.

Laws of this file:
  1. A rank makes the communicators that it is in, and no others, in an order that is the same everywhere.
  2. NCCL connects when a communicator is first used in some way, and both sides wait on the host for that. It would
     come at a different time on every rank, and two ranks that each wait for a third one would wait for ever. So
     communicators are used at once, in that order, in all the ways in which they will be used.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch.distributed.distributed_c10d import Store

from penstock.runtime.devices.accelerators import Accelerator, accelerator_of
from penstock.runtime.devices.communicators import Communicator, Members, connect_gloo
from penstock.runtime.devices.staging import HostStaging, Staging, staging_for
from penstock.runtime.transport.backend_selection import (
    SHARED_MEMORY,
    Backend,
    channels,
    device_info_of,
    select_backends,
    sums_over_nccl,
    warn_of_many,
    warn_of_sharing,
)
from penstock.runtime.transport.connection_rounds import arrange
from penstock.runtime.transport.gloo.all_reduce import GroupSum
from penstock.runtime.transport.gloo.receivers import GlooInbox
from penstock.runtime.transport.gloo.senders import GlooOutbox
from penstock.runtime.transport.nccl.all_reduce import NcclSum
from penstock.runtime.transport.nccl.endpoints import EndpointOptions, NcclInbox, NcclOutbox
from penstock.runtime.transport.nccl.send_notices import SendNotices
from penstock.runtime.transport.nccl.watchdog import Watchdog
from penstock.runtime.transport.ordered_all_reduce import Agreement
from penstock.runtime.transport.shared_memory.endpoints import Flusher, SharedInbox, SharedOutbox
from penstock.runtime.transport.shared_memory.handshake import Gather, LocalPeers, connect_local_peers
from penstock.runtime.transport.shared_memory.ring_buffers import can_share
from penstock.runtime.transport.timeouts import Timeout
from penstock.runtime.transport.transport import Edge

__all__ = ["Endpoints", "Inbox", "Outbox", "Sum"]

Inbox: TypeAlias = GlooInbox | NcclInbox | SharedInbox
Outbox: TypeAlias = GlooOutbox | NcclOutbox | SharedOutbox
Sum: TypeAlias = GroupSum | NcclSum

_GRACE = 60.0
"""Seconds that a communicator's own timeout comes after ours, which knows more to say."""
_SHUTDOWN_SECONDS = 30.0
"""How long the other ranks may take to come to the end as well."""


@dataclass(slots=True)
class Endpoints:
    """The ends of the process `rank` of `ranks`, which computes on `device`."""

    rank: int
    ranks: int
    device: torch.device
    store: Store
    """Where the processes met, with no names in it of other ends."""
    timeout: Timeout
    accelerator: Accelerator | None = field(init=False)
    watch: Watchdog = field(init=False)
    notices: SendNotices = field(init=False)
    pusher: Flusher = field(default_factory=Flusher)
    outboxes: dict[Edge, Outbox] = field(default_factory=dict)
    inboxes: dict[Edge, Inbox] = field(default_factory=dict)
    sums: dict[tuple[int, ...], Sum] = field(default_factory=dict)
    _staging: Staging = field(init=False)
    """Of all that passes through the host: a GPU has few streams."""
    _shutdowns: list[Callable[[], None]] = field(default_factory=list)
    """Of the communicators between devices, in the order in which they were made."""

    def __post_init__(self) -> None:
        self.accelerator = accelerator_of(self.device)
        self.watch = Watchdog(self.timeout, self.accelerator.enter_thread if self.accelerator else lambda: None)
        self.notices = SendNotices(self.store, self.ranks)
        self._staging = staging_for(self.device, self.watch.check)

    def connect(self, edges: Sequence[Edge], groups: Sequence[tuple[int, ...]], gather: Gather) -> None:
        """Makes the ends of `edges`, and of sums over `groups` of ranks. Collective; `gather` gives every process what
        each of them says.
        """
        rank = self.rank
        willing = can_share() and self.device.type == "cpu" and os.environ.get(SHARED_MEMORY, "1") != "0"
        peers = {peer for edge in edges for peer in (edge.source, edge.target) if rank in (edge.source, edge.target)}
        met = connect_local_peers(peers - {rank}, rank, gather, willing)
        near = {edge for edge in edges if rank == edge.source and edge.target in met}
        said = gather((near, device_info_of(self.device)))
        cards, shared = [card for _, card in said], {edge for those, _ in said for edge in those}
        warn_of_sharing(cards, rank)
        chosen = select_backends(edges, cards, shared)
        for meeting in arrange(chosen, lambda edge: (edge.source, edge.target)):
            for edge in meeting:
                if rank in (edge.source, edge.target):
                    self._connect(edge, chosen[edge], met)
        met.part()
        for summing in arrange(groups, lambda members: members):
            for members in summing:
                if rank in members:
                    self.sums[members] = self._sum(members, sums_over_nccl(members, cards))
        warn_of_many(len(self._shutdowns), rank)
        self.watch.start()

    def shut(self) -> bool:
        """Gives back what the communicators between devices took, together with the other ranks; whether they came."""
        if not self._shutdowns:
            return True
        thread = threading.Thread(target=self._shut_in_order, name="penstock shutdown", daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_SECONDS)
        return not thread.is_alive()

    def _shut_in_order(self) -> None:
        if self.accelerator is not None:
            self.accelerator.enter_thread()
        while self._shutdowns:
            self._shutdowns.pop(0)()

    def _members(self, name: str, ranks: Sequence[int]) -> Members:
        seconds = self.timeout.timeout_seconds + _GRACE
        return Members(f"penstock {name}", tuple(sorted(ranks)), self.rank, self.store, seconds)

    def _connect(self, edge: Edge, carrier: Backend, met: LocalPeers) -> None:
        """Makes this process's end of `edge`."""
        sends = edge.source == self.rank
        if carrier is Backend.MEMORY:
            if sends:
                self.outboxes[edge] = SharedOutbox(edge, met, self.pusher)
            else:
                self.inboxes[edge] = SharedInbox(edge, met, self.timeout)
            return
        members = self._members(str(edge), (edge.source, edge.target))
        peer = members.place(edge.target if sends else edge.source)
        if carrier is Backend.NCCL:
            self._connect_nccl(edge, members, peer)
        elif sends:
            self.outboxes[edge] = GlooOutbox(edge, connect_gloo(members), peer, self._staging)
        else:
            # Reports are read on the host; who wants them on the device puts them there.
            staging = HostStaging() if edge.lane == "reports" else self._staging
            self.inboxes[edge] = GlooInbox(edge, connect_gloo(members), peer, staging, self.timeout)

    def _connect_nccl(self, edge: Edge, members: Members, peer: int) -> None:
        assert self.accelerator is not None, "NCCL was chosen without a GPU"
        group = self.accelerator.communicator(members, channels())
        line = EndpointOptions(edge, group, peer, self.accelerator, self.notices, self.timeout, self.watch.check)
        end: NcclOutbox | NcclInbox
        if edge.source == self.rank:
            end = self.outboxes[edge] = NcclOutbox(line)
        else:
            end = self.inboxes[edge] = NcclInbox(line)
        end.meet(torch.zeros(1, device=self.device))
        self._look_after(str(edge), end, group)

    def _look_after(self, place: str, end: NcclOutbox | NcclInbox | NcclSum, group: Communicator) -> None:
        assert self.accelerator is not None
        failure = self.accelerator.failure
        self.watch.over(place, end, group.abort, lambda: failure(group))
        self._shutdowns.append(group.shutdown)

    def _hold(self, place: str, peers: Sequence[int], is_done: Callable[[], bool]) -> None:
        """In the first steps waits for what has been begun with `peers`."""

        def may_go_on() -> bool:
            self.watch.check()
            return not self.notices.careful or is_done() or self.notices.look()

        self.timeout.wait_for(may_go_on, place, peers)

    def _sum(self, ranks: tuple[int, ...], direct: bool) -> Sum:
        place = f"the sum over ranks {list(ranks)}"
        members, agreement = self._members(place, ranks), Agreement(ranks, self.rank, self.store, self.timeout)
        if not direct or self.accelerator is None:
            return GroupSum(ranks, connect_gloo(members), self.rank, agreement, self._staging, self.timeout)
        group = self.accelerator.communicator(members, 2 * channels())
        made = NcclSum(
            ranks,
            group,
            self.rank,
            agreement,
            self.device,
            self.accelerator,
            self._staging,
            self.watch.check,
            partial(self._hold, place, [other for other in ranks if other != self.rank]),
        )
        made.meet()
        self._look_after(place, made, group)
        return made
