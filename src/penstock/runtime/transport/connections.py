"""The connections of a process: one end of each of its edges, and its sums, each over the selected backend.

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
from contextlib import suppress
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from penstock.runtime.collectives.failures import require_descriptors
from penstock.runtime.collectives.store_gathers import StoreGather
from penstock.runtime.collectives.timeouts import GRACE_SECONDS, Timeout
from penstock.runtime.devices.accelerators import Stream, accelerator_of
from penstock.runtime.devices.communicators import Communicator, Members, break_gloo, connect_gloo
from penstock.runtime.devices.staging import HostStaging, staging_for
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
from penstock.runtime.transport.gloo.receivers import GlooInbox
from penstock.runtime.transport.gloo.senders import GlooOutbox
from penstock.runtime.transport.message_headers import ReceivedKinds, SentKinds
from penstock.runtime.transport.nccl.all_reduce import NcclSum
from penstock.runtime.transport.nccl.endpoints import EndpointOptions, NcclInbox, NcclOutbox
from penstock.runtime.transport.nccl.send_notices import SendNotices
from penstock.runtime.transport.nccl.watchdog import PendingWork, Watchdog
from penstock.runtime.transport.ordered_all_reduce import Agreement, GlooSum, OrderedSum
from penstock.runtime.transport.shared_memory.endpoints import SharedInbox, SharedOutbox
from penstock.runtime.transport.shared_memory.local_peers import Gather, LocalPeers
from penstock.runtime.transport.shared_memory.ring_buffers import can_share
from penstock.runtime.transport.transport import Channel, Edge
from penstock.torch_internals.distributed import device_backend

T = TypeVar("T")

_WAKE_SECONDS = 2.0
"""How long a thread may take to end whose connection is broken."""
_SHUTDOWN_SECONDS = 30.0
"""How long the other ranks may take to reach the shutdown."""


class _MeshGroup(NamedTuple):
    """A group of a mesh, as the watchdog knows endpoints. What is pending in it, only its layers know."""

    peers: Sequence[int]
    pending: PendingWork = PendingWork()
    waits_between_steps: bool = False


class Connections:
    """Makes, watches and ends the connections of `rank`. `connect` is collective, as those of its transport are."""

    def __init__(
        self, rank: int, device: torch.device, store: Store, name: str, *, timeout: Timeout, notices: SendNotices
    ) -> None:
        self._rank, self._device, self._store, self._name = rank, device, store, name
        self._timeout, self._notices, self._accelerator = timeout, notices, accelerator_of(device)
        self.watchdog = Watchdog(timeout, self._accelerator.enter_thread if self._accelerator else lambda: None)
        self._staging = staging_for(device, self.watchdog.check)
        """One staging for all messages through the host: a GPU has few streams."""
        self.outboxes: dict[Edge, GlooOutbox | NcclOutbox | SharedOutbox] = {}
        self.inboxes: dict[Edge, GlooInbox | NcclInbox | SharedInbox] = {}
        self.sums: dict[tuple[int, ...], GlooSum | NcclSum] = {}
        self._breaks: list[Callable[[], None]] = []
        """Ends the operations of a communicator between hosts each."""
        self._shutdowns: list[Callable[[], None]] = []
        """Releases the communicators between devices, in the order in which they were made."""

    def connect(self, edges: Sequence[Edge], groups: Sequence[tuple[int, ...]], gather: Gather) -> None:
        shared = self._share_memory(edges, gather)
        devices = [DeviceInfo(*info) for info in gather(tuple(device_info_of(self._device)))]
        warn_of_shared_gpus(devices, self._rank)
        chosen = select_backends(edges, devices, shared)
        for connections in arrange(chosen, lambda edge: (edge.source, edge.target)):
            for edge in connections:
                if self._rank in (edge.source, edge.target) and edge not in shared:
                    self._connect(edge, chosen[edge])
        for disjoint in arrange(groups, lambda ranks: ranks):
            for ranks in disjoint:
                if self._rank in ranks:
                    self.sums[ranks] = self._sum(ranks, sums_over_nccl(ranks, devices))
        warn_of_many_communicators(len(self._shutdowns), self._rank)

    def watch_groups(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Has those of `groups` that communicate between devices end as well when a rank fails: their operations would
        wait until the timeout of PyTorch, which then ends the process. Gloo's end when a connection breaks.
        """
        if self._accelerator is None:
            return
        failure = self._accelerator.failure
        for group in groups:
            backend = device_backend(group, self._device)
            if backend.name() == self._accelerator.backend:
                ranks = sorted(dist.get_process_group_ranks(group))
                ended = _MeshGroup([rank for rank in ranks if rank != self._rank]), backend.abort
                self.watchdog.watch(f"a collective of ranks {ranks}", *ended, partial(failure, backend))

    def end(self) -> bool:
        """Ends the threads and the communicators between devices. Returns False if a thread cannot be ended."""
        failed = self._timeout.board.failed
        deadline = time.monotonic() + (0.5 if failed else 60.0)
        endpoints = [*self.outboxes.values(), *self.inboxes.values(), *self.sums.values()]
        ended = [endpoint.join(max(0.0, deadline - time.monotonic())) for endpoint in endpoints]
        if not all(ended):
            # A thread that still waits for a message does so because of a failure.
            self._break_connections()
        if failed or not all(ended) or not self._shutdown():
            self.watchdog.abort()
        self.watchdog.close()
        if self._threads():
            return False
        # A communicator between devices that did not end would be waited for when it is dropped.
        if all(ended) or self._accelerator is None:
            for ends in (self.outboxes, self.inboxes, self.sums, self._breaks):
                ends.clear()
            self._notices.release()
        return True

    def _share_memory(self, edges: Sequence[Edge], gather: Gather) -> set[Edge]:
        """Makes this process's endpoints of the edges whose processes share memory. Returns these edges, of all ranks.
        The edges are the same on all ranks, so their positions name them.
        """
        shares = can_share() and self._device.type == "cpu" and os.environ.get(SHARED_MEMORY, "1") != "0"
        peers = LocalPeers(self._rank, gather, shares)
        outboxes = {
            number: SharedOutbox(SentKinds(edge))
            for number, edge in enumerate(edges)
            if edge.source == self._rank and edge.target in peers
        }
        inboxes: dict[int, SharedInbox] = {}
        for offers in gather({number: outbox.offer() for number, outbox in outboxes.items()}):
            for number, offer in offers.items():
                if edges[number].target == self._rank:
                    with suppress(OSError):
                        inboxes[number] = SharedInbox(ReceivedKinds(edges[number]), peers, offer, self._timeout)
        shared = {number for opened in gather(list(inboxes)) for number in opened}
        for number in shared & outboxes.keys():
            outboxes[number].connected()
            self.outboxes[edges[number]] = outboxes[number]
        self.inboxes.update({edges[number]: inbox for number, inbox in inboxes.items()})
        return {edges[number] for number in shared}

    def _threads(self) -> list[threading.Thread]:
        """The threads that wait for Gloo, or may do so."""
        ends = [*self.outboxes.values(), *self.inboxes.values(), *self.sums.values()]
        known = [end.thread for end in ends if isinstance(end, GlooInbox | GlooOutbox | GlooSum)]
        return [thread for thread in known if thread is not None and thread.is_alive()]

    def _break_connections(self) -> None:
        """Ends all operations over Gloo, and waits for a while until the threads that wait for them end."""
        for end in self._breaks:
            end()
        deadline = time.monotonic() + _WAKE_SECONDS
        for thread in self._threads():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _shutdown(self) -> bool:
        """Releases the communicators between devices, together with the other ranks. Returns whether all ranks came."""
        if not self._shutdowns:
            return True

        def release_in_order() -> None:
            if self._accelerator is not None:
                self._accelerator.enter_thread()
            while self._shutdowns:
                self._shutdowns.pop(0)()

        thread = threading.Thread(target=release_in_order, name="penstock shutdown", daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_SECONDS)
        return not thread.is_alive()

    def _members(self, name: str, ranks: Sequence[int]) -> Members:
        seconds = self._timeout.timeout_seconds + GRACE_SECONDS
        return Members(f"penstock {name}", tuple(sorted(ranks)), self._rank, self._store, seconds)

    @cached_property
    def _receiving(self) -> Stream:
        assert self._accelerator is not None
        return self._accelerator.stream()

    def _gloo(self, members: Members) -> Communicator:
        """Makes a communicator on the host. That waits for all members."""
        self._connecting(members, partial(require_descriptors, len(members.ranks) - 1))
        group = self._connecting(members, partial(connect_gloo, members))
        peer = next(member for member in members.ranks if member != self._rank)
        self._breaks.append(partial(break_gloo, group, members.group_rank(peer)))
        return group

    def _nccl(self, members: Members, ctas: int) -> Communicator:
        """Makes a communicator between devices. That waits for all members."""
        accelerator = self._accelerator
        assert accelerator is not None
        return self._connecting(members, lambda: accelerator.communicator(members, ctas))

    def _connecting(self, members: Members, connect: Callable[[], T]) -> T:
        """Returns what `connect` does, which waits for all members: it makes a communicator, or is its first use."""

        def work() -> T:
            if self._accelerator is not None:
                self._accelerator.enter_thread()
            return connect()

        peers = [member for member in members.ranks if member != self._rank]
        return self._timeout.run(work, f"connecting {members.name}", peers)

    def _connect(self, edge: Edge, backend: Backend) -> None:
        """Makes this process's endpoint of `edge`."""
        sends = edge.source == self._rank
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
            self.inboxes[edge] = GlooInbox(ReceivedKinds(edge), self._gloo(members), peer, staging, self._timeout)

    def _connect_nccl(self, edge: Edge, members: Members, peer: int) -> None:
        assert self._accelerator is not None, "NCCL was chosen without a GPU"
        group = self._nccl(members, ctas_per_message())
        options = EndpointOptions(
            edge=edge,
            group=group,
            peer=peer,
            accelerator=self._accelerator,
            receiving=self._receiving,
            notices=self._notices,
            timeout=self._timeout,
            check=self.watchdog.check,
        )
        endpoint: NcclOutbox | NcclInbox
        if edge.source == self._rank:
            endpoint = self.outboxes[edge] = NcclOutbox(options)
        else:
            endpoint = self.inboxes[edge] = NcclInbox(options)
        self._connecting(members, partial(endpoint.rehearse, torch.zeros(1, device=self._device)))
        self._watch(str(edge), endpoint, group)

    def _watch(self, context: str, endpoint: NcclOutbox | NcclInbox | NcclSum, group: Communicator) -> None:
        assert self._accelerator is not None
        failure = self._accelerator.failure
        self.watchdog.watch(context, endpoint, group.abort, lambda: failure(group))
        self._shutdowns.append(group.shutdown)

    def _wait_in_first_steps(self, context: str, peers: Sequence[int], is_done: Callable[[], bool]) -> None:
        """In the first steps, waits until an operation that was started with `peers` is done."""

        def can_go_on() -> bool:
            self.watchdog.check()
            return not self._notices.announcing or is_done() or self._notices.poll()

        self._timeout.wait_for(can_go_on, context, peers)

    def _sum(self, ranks: tuple[int, ...], over_nccl: bool) -> GlooSum | NcclSum:
        agreement = Agreement(StoreGather(f"{self._name}/sum {ranks} ", self._rank, ranks, self._timeout))
        members = self._members(agreement.context, ranks)
        if not over_nccl or self._accelerator is None:
            ordered_sum = OrderedSum(ranks, self._gloo(members), self._rank)
            return GlooSum(ordered_sum, agreement, self._staging, self._timeout)
        group = self._nccl(members, 2 * ctas_per_message())
        made = NcclSum(
            OrderedSum(ranks, group, self._rank),
            agreement,
            self._device,
            self._accelerator,
            self._staging,
            self.watchdog.check,
            partial(self._wait_in_first_steps, agreement.context, agreement.peers),
        )
        self._connecting(members, made.rehearse)
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
