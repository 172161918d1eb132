"""Ranks do not deadlock if their hosts block until their device is done, wherever they compute.

A real host blocks until its device has done all enqueued work when CUDA loads a kernel at its first use, compiles one,
or looks for memory. Here it always does, in the first steps, which is the worst case. Ranks are threads. Messages use
the NCCL endpoints over a simulated device, whose sends wait for their receives.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest
import torch
from torch.distributed import HashStore

from penstock.runtime.transport.failures import FailureBoard
from penstock.runtime.transport.nccl.endpoints import EndpointOptions, NcclInbox, NcclOutbox
from penstock.runtime.transport.nccl.send_notices import SendNotices
from penstock.runtime.transport.timeouts import Timeout
from penstock.runtime.transport.transport import Edge, PendingMessage
from penstock.scheduling.actions import Action, Receive, Send
from penstock.scheduling.definitions import Drain, Segment, Step
from penstock.scheduling.lowering import peer
from penstock.scheduling.schedules import Schedule
from support.simulated.simulated_device import SimulatedDevice, SimulatedStream
from support.simulated.simulated_nccl import SimulatedCommunicator

LAYOUT = torch.Size((2,)), (1,), torch.float64


class LazyHosts:
    """The ranks of `schedule`, which wait `seconds` for each other."""

    def __init__(self, schedule: Schedule, seed: int, seconds: float) -> None:
        self._schedule, self._seconds = schedule, seconds
        self._device = SimulatedDevice(seed, streams=10**6)
        self._streams = {rank: [self._device.stream()] for rank in range(schedule.ranks)}
        """By rank: the stream that it computes on and those of its communicators."""
        self._idle = {rank: self._device.stream() for rank in range(schedule.ranks)}
        self._outboxes: dict[Edge, NcclOutbox] = {}
        self._inboxes: dict[Edge, NcclInbox] = {}
        store = HashStore()
        self._board = FailureBoard(store, 0, schedule.ranks)
        self.notices = [SendNotices(self._board.watch, schedule.ranks, "", seconds) for _ in range(schedule.ranks)]
        for edge in sorted(self._edges()):
            self._connect(edge, store)

    def run(self, segments: Sequence[Segment], announcing: int | None = None) -> list[str]:
        """Runs `segments` and returns the errors of the ranks. Messages are announced in the first `announcing`
        segments; in all of them if it is None.
        """
        found: list[str] = []

        def run_rank(rank: int) -> None:
            try:
                with self._device.on(self._streams[rank][0]):
                    for number, segment in enumerate(segments):
                        if number == announcing:
                            self._end_first_steps(rank)
                        self._carry_out(rank, self._schedule.row(rank, segment))
            except Exception as error:
                found.append(f"rank {rank}: {error}")

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(self._schedule.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def _end_first_steps(self, rank: int) -> None:
        while self.notices[rank].announcing:
            self.notices[rank].begin_segment()

    def _carry_out(self, rank: int, program: Sequence[Action]) -> None:
        self.notices[rank].begin_segment()
        receives: defaultdict[Edge, list[PendingMessage]] = defaultdict(list)
        for edge, action in self._exchanges(rank, program):
            if isinstance(action, Receive):
                receives[edge].append(self._inboxes[edge].post("kind"))
        for action in program:
            if isinstance(action, Send):
                tensor = self._device.device_memory(LAYOUT, self._device.current())
                self._outboxes[Edge(rank, self._peer(action, rank))].put("kind", (tensor,))
            elif isinstance(action, Receive):
                receives[Edge(self._peer(action, rank), rank)].pop(0).wait()
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
            options = EndpointOptions(
                edge=edge,
                group=group.end(rank),
                peer=other,
                accelerator=self._device,
                receiving=self._idle[rank],
                notices=self.notices[rank],
                timeout=timeout,
                check=lambda: None,
            )
            if rank == edge.source:
                self._outboxes[edge] = NcclOutbox(options)
            else:
                self._inboxes[edge] = NcclInbox(options)


def name(schedule: Schedule) -> str:
    """The name of a test case."""
    return f"{schedule.method}-{schedule.ranks}-{schedule.microbatches}"


SCHEDULES = (
    Schedule("gpipe", 3, 4),
    Schedule("1f1b-flush", 2, 4),
    Schedule("1f1b-flush", 4, 6),
    # In these, two ranks send to each other, and compute before they receive.
    Schedule("interleaved", 2, 4, stages_per_rank=2),
    Schedule("interleaved", 4, 8, stages_per_rank=2),
    Schedule("spp", 2, 4),
    Schedule("spp", 4, 4),
    Schedule("zb-h1", 3, 4),
    Schedule("zb-v", 2, 2, stages_per_rank=2),
    Schedule("zb-v", 4, 8, stages_per_rank=2),
    Schedule("pipedream", 4, 1),
    Schedule("2bw", 4, 4),
)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_hosts_that_block_wherever_they_compute_do_not_deadlock(schedule: Schedule, seed: int) -> None:
    hosts = LazyHosts(schedule, seed, seconds=20.0)

    assert hosts.run([*(Step(minibatch) for minibatch in range(3)), Drain(3)]) == []
    assert all(notices.announcing for notices in hosts.notices)


SEGMENTS = (*(Step(minibatch) for minibatch in range(6)), Drain(6))


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("method", ["gpipe", "1f1b-flush", "zb-h1", "pipedream", "2bw"])
def test_some_schedules_need_no_notices(method: str, ranks: int) -> None:
    """Their ranks receive before they compute on."""
    hosts = LazyHosts(Schedule(method, ranks, 2 * ranks), 0, seconds=20.0)

    assert hosts.run(SEGMENTS, announcing=3) == []


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s.method in ("interleaved", "spp", "zb-v")], ids=name)
def test_without_notices_others_deadlock(schedule: Schedule) -> None:
    """Enqueueing a receive when it is wanted is not enough: each rank's send waits for the other rank's receive."""
    found = LazyHosts(schedule, 0, seconds=1.0).run(SEGMENTS, announcing=3)

    assert any("waits for a device that waits for another rank" in error for error in found)
