"""Ranks whose hosts stand still at every computation until their device is done with all that it has been told.

A host does so where CUDA loads a kernel at its first use, compiles one, or looks for memory. Here it always does, in
the first steps, which is the worst that can happen. Ranks are threads; messages go by the ends of NCCL over a simulated
device, whose sends wait for their receives.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch.distributed import HashStore

from penstock.runtime.transport.failures import FailureBoard
from penstock.runtime.transport.nccl.endpoints import EndpointOptions, NcclInbox, NcclOutbox
from penstock.runtime.transport.nccl.send_notices import SendNotices
from penstock.runtime.transport.timeouts import Timeout
from penstock.runtime.transport.transport import Edge, PendingMessage
from penstock.scheduling.actions import Action, Receive, Send
from penstock.scheduling.definitions import Segment
from penstock.scheduling.lowering import peer
from penstock.scheduling.schedules import Schedule
from support.simulated.simulated_device import SimulatedDevice, SimulatedStream
from support.simulated.simulated_nccl import SimulatedCommunicator

__all__ = ["LazyHosts"]

LAYOUT = torch.Size((2,)), (1,), torch.float64


class LazyHosts:
    """The ranks of `schedule`, which wait `seconds` for each other."""

    def __init__(self, schedule: Schedule, seed: int, seconds: float) -> None:
        self._schedule, self._seconds = schedule, seconds
        self._device = SimulatedDevice(seed, streams=10**6)
        self._streams = {rank: [self._device.stream()] for rank in range(schedule.ranks)}
        """Of each rank, the one that it computes on and those of its communicators."""
        self._outboxes: dict[Edge, NcclOutbox] = {}
        self._inboxes: dict[Edge, NcclInbox] = {}
        store = HashStore()
        self.notices = [SendNotices(store, schedule.ranks) for _ in range(schedule.ranks)]
        for edge in sorted(self._edges()):
            self._connect(edge, store)

    def run(self, parts: Sequence[Segment], careful: int | None = None) -> list[str]:
        """What goes wrong with any rank on its way through `parts`. After so many of them, the `careful` ones, nobody
        says any more what is on its way; None for never.
        """
        found: list[str] = []

        def live(rank: int) -> None:
            try:
                with self._device.on(self._streams[rank][0]):
                    for number, part in enumerate(parts):
                        if number == careful:
                            self._begin_to_train(rank)
                        self._carry_out(rank, self._schedule.row(rank, part))
            except Exception as error:
                found.append(f"rank {rank}: {error}")

        threads = [threading.Thread(target=live, args=(rank,)) for rank in range(self._schedule.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def _begin_to_train(self, rank: int) -> None:
        while self.notices[rank].careful:
            self.notices[rank].begin()

    def _carry_out(self, rank: int, program: Sequence[Action]) -> None:
        self.notices[rank].begin()
        tickets: defaultdict[Edge, list[PendingMessage]] = defaultdict(list)
        for edge, action in self._exchanges(rank, program):
            if isinstance(action, Receive):
                tickets[edge].append(self._inboxes[edge].post("form"))
        for action in program:
            if isinstance(action, Send):
                tensor = self._device.device_memory(LAYOUT, self._device.current())
                self._outboxes[Edge(rank, self._peer(action, rank))].put("form", (tensor,))
            elif isinstance(action, Receive):
                tickets[Edge(self._peer(action, rank), rank)].pop(0).wait()
            elif not self._device.settle(self._streams[rank], self._seconds):
                raise TimeoutError(f"{action} waits for a device that waits for another rank")

    def _edges(self) -> set[Edge]:
        programs = self._schedule.program(1)
        return {edge for rank in range(self._schedule.ranks) for edge, _ in self._exchanges(rank, programs[rank])}

    def _exchanges(self, rank: int, program: Iterable[Action]) -> list[tuple[Edge, Action]]:
        found: list[tuple[Edge, Action]] = []
        for action in program:
            if isinstance(action, Send):
                found.append((Edge(rank, self._peer(action, rank)), action))
            elif isinstance(action, Receive):
                found.append((Edge(self._peer(action, rank), rank), action))
        return found

    def _peer(self, action: Send | Receive, rank: int) -> int:
        return peer(action, rank, self._schedule.placement)

    def _connect(self, edge: Edge, store: HashStore) -> None:
        group = SimulatedCommunicator(self._device)
        for rank, other in ((edge.source, edge.target), (edge.target, edge.source)):
            stream: SimulatedStream = group.streams[rank]
            self._streams[rank].append(stream)
            timeout = Timeout(FailureBoard(store, rank, self._schedule.ranks), self._seconds)
            line = EndpointOptions(
                edge, group.end(rank), other, self._device, self.notices[rank], timeout, lambda: None
            )
            if rank == edge.source:
                self._outboxes[edge] = NcclOutbox(line)
            else:
                self._inboxes[edge] = NcclInbox(line)
