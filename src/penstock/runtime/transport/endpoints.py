"""Makes this process's endpoints of all edges and sums, together with the other processes.

Invariants of this file:
  1. A rank makes exactly the communicators that it is a member of, in an order that is the same on all ranks.
  2. NCCL connects two ranks when a communicator is first used for a kind of operation, and both hosts block until that
     is done. During training that would happen at a different time on every rank, and ranks that each wait for a third
     one could deadlock. So every communicator is used right after it is made, in that same order, for all kinds of
     operations that it will be used for.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch.distributed.distributed_c10d import Store

from penstock.runtime.devices.accelerators import Accelerator, accelerator_of
from penstock.runtime.devices.communicators import Communicator, Members, break_gloo, connect_gloo
from penstock.runtime.devices.staging import HostStaging, Staging, staging_for
from penstock.runtime.transport.backend_selection import (
    SHARED_MEMORY,
    Backend,
    DeviceInfo,
    ctas_per_message,
    device_info_of,
    select_backends,
    sums_over_nccl,
    warn_of_many_communicators,
    warn_of_shared_gpus,
)
from penstock.runtime.transport.failures import require_descriptors
from penstock.runtime.transport.gloo.all_reduce import GlooSum
from penstock.runtime.transport.gloo.receivers import GlooInbox
from penstock.runtime.transport.gloo.senders import GlooOutbox
from penstock.runtime.transport.message_headers import ReceivedKinds, SentKinds
from penstock.runtime.transport.nccl.all_reduce import NcclSum
from penstock.runtime.transport.nccl.endpoints import EndpointOptions, NcclInbox, NcclOutbox
from penstock.runtime.transport.nccl.send_notices import SendNotices
from penstock.runtime.transport.nccl.watchdog import Watchdog
from penstock.runtime.transport.ordered_all_reduce import Agreement, OrderedSum
from penstock.runtime.transport.run_keys import RunKey
from penstock.runtime.transport.shared_memory.endpoints import Flusher, SharedInbox, SharedOutbox
from penstock.runtime.transport.shared_memory.handshake import Gather, LocalPeers, connect_local_peers
from penstock.runtime.transport.shared_memory.ring_buffers import can_share
from penstock.runtime.transport.store_gathers import StoreGather
from penstock.runtime.transport.store_watch import WatchedStore
from penstock.runtime.transport.timeouts import GRACE_SECONDS, Timeout
from penstock.runtime.transport.transport import Channel, Edge

T = TypeVar("T")
_AnyInbox: TypeAlias = GlooInbox | NcclInbox | SharedInbox
_AnyOutbox: TypeAlias = GlooOutbox | NcclOutbox | SharedOutbox
_AnySum: TypeAlias = GlooSum | NcclSum

_SHUTDOWN_SECONDS = 30.0
"""How long the other ranks may take to reach the shutdown."""


@dataclass(slots=True)
class Endpoints:
    """Holds all transport endpoints of one process: `rank` of `ranks`, which computes on `device`."""

    rank: int
    ranks: int
    device: torch.device
    store: Store
    """Where communicators exchange addresses. It holds no keys of other endpoints."""
    timeout: Timeout
    notes: WatchedStore
    """Where the processes exchange everything else."""
    accelerator: Accelerator | None = field(init=False)
    watchdog: Watchdog = field(init=False)
    notices: SendNotices = field(init=False)
    flusher: Flusher = field(default_factory=Flusher)
    outboxes: dict[Edge, _AnyOutbox] = field(default_factory=dict)
    inboxes: dict[Edge, _AnyInbox] = field(default_factory=dict)
    sums: dict[tuple[int, ...], _AnySum] = field(default_factory=dict)
    _staging: Staging = field(init=False)
    """One staging for all messages through the host: a GPU has few streams."""
    _breaks: list[Callable[[], None]] = field(default_factory=list)
    """Ends the operations of a communicator between hosts each."""
    _shutdowns: list[Callable[[], None]] = field(default_factory=list)
    """Releases the communicators between devices, in the order in which they were made."""

    def __post_init__(self) -> None:
        self.accelerator = accelerator_of(self.device)
        self.watchdog = Watchdog(self.timeout, self.accelerator.enter_thread if self.accelerator else lambda: None)
        self.notices = SendNotices(self.notes, self.ranks)
        self._staging = staging_for(self.device, self.watchdog.check)

    def connect(self, edges: Sequence[Edge], groups: Sequence[tuple[int, ...]], gather: Gather, key: RunKey) -> None:
        """Makes the endpoints of `edges`, and of sums over `groups` of ranks. Collective; `gather` returns what each
        process passes to it, on every process. `key`: that of the run.
        """
        rank = self.rank
        shares = can_share() and self.device.type == "cpu" and os.environ.get(SHARED_MEMORY, "1") != "0"
        peers = {peer for edge in edges for peer in (edge.source, edge.target) if rank in (edge.source, edge.target)}
        local_peers = connect_local_peers(peers - {rank}, rank, gather, key if shares else None)
        # The edges are the same on all ranks, so their positions name them.
        mine = [n for n, edge in enumerate(edges) if rank == edge.source and edge.target in local_peers]
        gathered = gather((mine, tuple(device_info_of(self.device))))
        devices = [DeviceInfo(*info) for _, info in gathered]
        shared = {edges[number] for numbers, _ in gathered for number in numbers}
        warn_of_shared_gpus(devices, rank)
        chosen = select_backends(edges, devices, shared)
        for connections in arrange(chosen, lambda edge: (edge.source, edge.target)):
            for edge in connections:
                if rank in (edge.source, edge.target):
                    self._connect(edge, chosen[edge], local_peers)
        local_peers.close()
        for disjoint in arrange(groups, lambda ranks: ranks):
            for ranks in disjoint:
                if rank in ranks:
                    self.sums[ranks] = self._sum(ranks, sums_over_nccl(ranks, devices))
        warn_of_many_communicators(len(self._shutdowns), rank)
        self.watchdog.start()

    def threads(self) -> list[threading.Thread]:
        """The threads that wait for Gloo, or may do so."""
        ends = [*self.outboxes.values(), *self.inboxes.values(), *self.sums.values()]
        known = [end.thread for end in ends if isinstance(end, GlooInbox | GlooOutbox | GlooSum)]
        return [thread for thread in known if thread is not None and thread.is_alive()]

    def break_connections(self, seconds: float) -> None:
        """Ends all operations over Gloo, and waits for at most `seconds` until the threads that wait for them end."""
        for end in self._breaks:
            end()
        deadline = time.monotonic() + seconds
        for thread in self.threads():
            thread.join(max(0.0, deadline - time.monotonic()))

    def shutdown(self) -> bool:
        """Releases the communicators between devices, together with the other ranks. Returns whether all ranks came."""
        if not self._shutdowns:
            return True
        thread = threading.Thread(target=self._release_in_order, name="penstock shutdown", daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_SECONDS)
        return not thread.is_alive()

    def release(self) -> None:
        """Forgets all endpoints, which have been closed, and with them their communicators."""
        self.outboxes.clear()
        self.inboxes.clear()
        self.sums.clear()
        self._breaks.clear()
        self.notices.release()

    def _release_in_order(self) -> None:
        if self.accelerator is not None:
            self.accelerator.enter_thread()
        while self._shutdowns:
            self._shutdowns.pop(0)()

    def _members(self, name: str, ranks: Sequence[int]) -> Members:
        seconds = self.timeout.timeout_seconds + GRACE_SECONDS
        return Members(f"penstock {name}", tuple(sorted(ranks)), self.rank, self.store, seconds)

    def _gloo(self, members: Members) -> Communicator:
        """Makes a communicator on the host. That waits for all members."""
        peers, connecting = [member for member in members.ranks if member != self.rank], f"connecting {members.name}"
        self.timeout.run(partial(require_descriptors, len(peers)), connecting, peers)
        group = self.timeout.run(lambda: connect_gloo(members), connecting, peers)
        self._breaks.append(partial(break_gloo, group, members.group_rank(peers[0])))
        return group

    def _connect(self, edge: Edge, backend: Backend, local_peers: LocalPeers) -> None:
        """Makes this process's endpoint of `edge`."""
        sends = edge.source == self.rank
        if backend is Backend.MEMORY:
            if sends:
                self.outboxes[edge] = SharedOutbox(SentKinds(edge), local_peers, self.flusher)
            else:
                self.inboxes[edge] = SharedInbox(ReceivedKinds(edge), local_peers, self.timeout)
            return
        members = self._members(str(edge), (edge.source, edge.target))
        peer = members.group_rank(edge.target if sends else edge.source)
        if backend is Backend.NCCL:
            self._connect_nccl(edge, members, peer)
        elif sends:
            staging = HostStaging() if edge.channel == Channel.CALLS else self._staging
            sent = SentKinds(edge, on_host=not staging.separate_memory)
            self.outboxes[edge] = GlooOutbox(sent, self._gloo(members), peer, staging)
        else:
            # Reports are read on the host. A reader that needs one on the device copies it there.
            staging = HostStaging() if edge.channel in (Channel.CALLS, Channel.REPORTS) else self._staging
            self.inboxes[edge] = GlooInbox(ReceivedKinds(edge), self._gloo(members), peer, staging, self.timeout)

    def _connect_nccl(self, edge: Edge, members: Members, peer: int) -> None:
        assert self.accelerator is not None, "NCCL was chosen without a GPU"
        group = self.accelerator.communicator(members, ctas_per_message())
        options = EndpointOptions(
            edge=edge,
            group=group,
            peer=peer,
            accelerator=self.accelerator,
            notices=self.notices,
            timeout=self.timeout,
            check=self.watchdog.check,
        )
        endpoint: NcclOutbox | NcclInbox
        if edge.source == self.rank:
            endpoint = self.outboxes[edge] = NcclOutbox(options)
        else:
            endpoint = self.inboxes[edge] = NcclInbox(options)
        endpoint.rehearse(torch.zeros(1, device=self.device))
        self._watch(str(edge), endpoint, group)

    def _watch(self, context: str, endpoint: NcclOutbox | NcclInbox | NcclSum, group: Communicator) -> None:
        assert self.accelerator is not None
        failure = self.accelerator.failure
        self.watchdog.watch(context, endpoint, group.abort, lambda: failure(group))
        self._shutdowns.append(group.shutdown)

    def _wait_in_first_steps(self, context: str, peers: Sequence[int], is_done: Callable[[], bool]) -> None:
        """In the first steps, waits until an operation that was started with `peers` is done."""

        def can_go_on() -> bool:
            self.watchdog.check()
            return not self.notices.announcing or is_done() or self.notices.poll()

        self.timeout.wait_for(can_go_on, context, peers)

    def _sum(self, ranks: tuple[int, ...], over_nccl: bool) -> _AnySum:
        agreement = Agreement(StoreGather(f"{self.notes.prefix}sum {ranks} ", self.rank, ranks, self.timeout))
        members = self._members(agreement.context, ranks)
        if not over_nccl or self.accelerator is None:
            ordered_sum = OrderedSum(ranks, self._gloo(members), self.rank)
            return GlooSum(ordered_sum, agreement, self._staging, self.timeout)
        group = self.accelerator.communicator(members, 2 * ctas_per_message())
        made = NcclSum(
            OrderedSum(ranks, group, self.rank),
            agreement,
            self.device,
            self.accelerator,
            self._staging,
            self.watchdog.check,
            partial(self._wait_in_first_steps, agreement.context, agreement.peers),
        )
        made.rehearse()
        self._watch(agreement.context, made, group)
        return made


def arrange(connections: Iterable[T], members: Callable[[T], Iterable[Hashable]]) -> list[list[T]]:
    """Arranges `connections` in rounds, in none of which two connections share a member. Each connection goes to the
    first round in which all of its `members` are free.

    Processes that make their connections round by round cannot wait for each other in a circle.
    """
    rounds: list[list[T]] = []
    busy: defaultdict[Hashable, set[int]] = defaultdict(set)
    for connection in connections:
        taken = set[int]().union(*(busy[member] for member in members(connection)))
        chosen = next(number for number in range(len(taken) + 1) if number not in taken)
        for member in members(connection):
            busy[member].add(chosen)
        rounds.extend([] for _ in range(chosen + 1 - len(rounds)))
        rounds[chosen].append(connection)
    return rounds
