"""Makes this process's ends of all edges and sums, together with all other processes.

Laws of this file:
  1. Communicators are made by all ranks, in one order, those included that they do not connect.
  2. Those of NCCL are used at once, in that order: NCCL connects at the first use, which would come at a different time
     on every rank, and two ranks that each wait for a third one would wait for ever.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from penstock.runtime.accelerators import accelerator_of
from penstock.runtime.carriers import SHARED_MEMORY, Carrier, card_of, choose, sums_over_nccl, warn_of_sharing
from penstock.runtime.gloo_inboxes import GlooInbox
from penstock.runtime.gloo_outboxes import GlooOutbox
from penstock.runtime.group_sums import GroupSum
from penstock.runtime.nccl_ends import Line, NcclInbox, NcclOutbox
from penstock.runtime.nccl_sums import NcclSum
from penstock.runtime.ordered_sums import Agreement, Group
from penstock.runtime.patience import Patience
from penstock.runtime.rendezvous import Acquaintances, Gather, meet
from penstock.runtime.rings import can_share
from penstock.runtime.shared_ends import Pusher, SharedInbox, SharedOutbox
from penstock.runtime.staging import staging_for
from penstock.runtime.transport import Edge
from penstock.runtime.watches import Watch

__all__ = ["Ends", "Inbox", "Outbox", "Sum"]

Inbox: TypeAlias = GlooInbox | NcclInbox | SharedInbox
Outbox: TypeAlias = GlooOutbox | NcclOutbox | SharedOutbox
Sum: TypeAlias = GroupSum | NcclSum

_GRACE = 60.0
"""Seconds that a communicator's own timeout comes after ours, which knows more to say."""


@dataclass(slots=True)
class Ends:
    """Of the process `rank`, which computes on `device`."""

    rank: int
    device: torch.device
    store: Store
    """Where the processes met."""
    patience: Patience
    watch: Watch
    pusher: Pusher = field(default_factory=Pusher)
    outboxes: dict[Edge, Outbox] = field(default_factory=dict)
    inboxes: dict[Edge, Inbox] = field(default_factory=dict)
    sums: dict[tuple[int, ...], Sum] = field(default_factory=dict)

    def connect(self, edges: Sequence[Edge], groups: Sequence[tuple[int, ...]], gather: Gather) -> None:
        """Makes the ends of `edges`, and of sums over `groups` of ranks. Collective; `gather` gives every process what
        each of them says.
        """
        rank = self.rank
        willing = can_share() and self.device.type == "cpu" and os.environ.get(SHARED_MEMORY, "1") != "0"
        peers = {peer for edge in edges for peer in (edge.source, edge.target) if rank in (edge.source, edge.target)}
        met = meet(peers - {rank}, rank, gather, willing)
        near = {edge for edge in edges if rank == edge.source and edge.target in met}
        said = gather((near, card_of(self.device)))
        cards, shared = [card for _, card in said], {edge for those, _ in said for edge in those}
        warn_of_sharing(cards, rank)
        for edge, carrier in choose(edges, cards, shared).items():
            if carrier is Carrier.MEMORY:
                self._share(edge, met)
                continue
            ranks = edge.source, edge.target
            if carrier is Carrier.GLOO:
                self._connect_gloo(edge, self._communicator(ranks, "gloo", str(edge)))
            else:
                self._connect_nccl(edge, self._communicator(ranks, cards[edge.source].backend, str(edge)))
        met.part()
        for members in groups:
            direct = sums_over_nccl(members, cards)
            backend = cards[members[0]].backend if direct else "gloo"
            group = self._communicator(members, backend, f"sum over {members}")
            if rank in members:
                self.sums[members] = self._sum(members, direct, group)
        self.watch.start()

    def _communicator(self, ranks: Sequence[int], backend: str, name: str) -> dist.ProcessGroup:
        made: dist.ProcessGroup = dist.new_group(
            list(ranks),
            backend=backend,
            timeout=timedelta(seconds=self.patience.timeout_seconds + _GRACE),
            group_desc=f"penstock {name}",
        )
        return made

    def _share(self, edge: Edge, met: Acquaintances) -> None:
        if edge.source == self.rank:
            self.outboxes[edge] = SharedOutbox(edge, met, self.pusher)
        elif edge.target == self.rank:
            self.inboxes[edge] = SharedInbox(edge, met, self.patience)

    def _connect_gloo(self, edge: Edge, group: dist.ProcessGroup) -> None:
        if edge.source == self.rank:
            self.outboxes[edge] = GlooOutbox(edge, group, staging_for(self.device, self.watch.check))
        elif edge.target == self.rank:
            # Reports are read on the host; who wants them on the device puts them there.
            staging = staging_for(torch.device("cpu") if edge.lane == "reports" else self.device)
            self.inboxes[edge] = GlooInbox(edge, group, staging, self.patience)

    def _connect_nccl(self, edge: Edge, group: dist.ProcessGroup) -> None:
        accelerator = accelerator_of(self.device)
        if self.rank not in (edge.source, edge.target):
            return
        assert accelerator is not None, "NCCL was chosen without a GPU"
        end: NcclOutbox | NcclInbox
        sends = edge.source == self.rank
        peer = dist.get_group_rank(group, edge.target if sends else edge.source)
        line = Line(edge, group, peer, self.store, self.patience, self.watch.check)
        if sends:
            end = self.outboxes[edge] = NcclOutbox(line)
        else:
            end = self.inboxes[edge] = NcclInbox(line, accelerator)
        with warnings.catch_warnings():
            # That the first message makes a communicator for two ranks is what it is sent for.
            warnings.filterwarnings("ignore", message="An unbatched P2P op")
            end.meet(torch.zeros(1, device=self.device))
        self.watch.over(str(edge), end, group.abort)

    def _sum(self, ranks: tuple[int, ...], direct: bool, group: dist.ProcessGroup) -> Sum:
        agreement = Agreement(ranks, self.rank, self.store, self.patience)
        staging = staging_for(self.device, self.watch.check)
        accelerator = accelerator_of(self.device)
        if not direct or accelerator is None:
            backend = cast(Group, group._get_backend(torch.device("cpu")))
            return GroupSum(ranks, backend, self.rank, agreement, staging, self.patience)
        backend = cast(Group, group if type(group) is not dist.ProcessGroup else group._get_backend(self.device))
        made = NcclSum(ranks, backend, self.rank, agreement, self.device, accelerator, staging, self.watch.check)
        made.meet()
        self.watch.over(f"the sum over ranks {list(ranks)}", made, group.abort)
        return made
