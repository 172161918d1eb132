"""Ranks do not deadlock if their hosts block until their device is done, wherever they compute.

A real host blocks until its device has done all enqueued work when CUDA loads a kernel at its first use, compiles one,
or looks for memory. Here it always does, in the first steps, which is the worst case. Ranks are threads. Messages use
the NCCL endpoints over a simulated device, whose sends wait for their receives.

A rank may consist of several tensor-parallel members, each a thread with a device of its own. They exchange messages
as `TensorParallelTransport` does: each sends its slice to the same member of another rank; the specs of a kind go
ahead, and the members compare what they send then; and they gather slices when they wait for a message.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

import pytest
import torch
from torch.distributed import HashStore

from penstock.runtime.collectives.failures import FailureBoard
from penstock.runtime.collectives.timeouts import Timeout
from penstock.runtime.transport.nccl.endpoints import EndpointOptions, NcclInbox, NcclOutbox
from penstock.runtime.transport.nccl.send_notices import SendNotices
from penstock.runtime.transport.tensor_parallel_transport import processes_of
from penstock.runtime.transport.transport import Edge, PendingMessage
from penstock.scheduling.actions import Action, Receive, Send
from penstock.scheduling.definitions import Drain, Segment, Step
from penstock.scheduling.lowering import peer
from penstock.scheduling.schedules import Schedule
from support.simulated.simulated_device import SimulatedDevice, SimulatedEvent, SimulatedStream
from support.simulated.simulated_nccl import SimulatedCommunicator

LAYOUT = torch.Size((2,)), (1,), torch.float64


class LazyHosts:
    """The ranks of `schedule`, of `members` processes each, which wait `seconds` for each other."""

    def __init__(self, schedule: Schedule, seed: int, seconds: float, members: int = 1) -> None:
        self._schedule, self._seconds, self._members = schedule, seconds, members
        self._device = SimulatedDevice(seed, streams=10**6)
        processes = range(schedule.ranks * members)
        self._streams = {process: [self._device.stream(), self._device.stream()] for process in processes}
        """By process: the stream that it computes on, that of its collectives, and those of its communicators."""
        self._idle = {process: self._device.stream() for process in processes}
        self._outboxes: dict[Edge, NcclOutbox] = {}
        self._inboxes: dict[Edge, NcclInbox] = {}
        store = HashStore()
        self._board = FailureBoard(store, 0, len(processes))
        timeout = Timeout(self._board, seconds)
        self.notices = [
            SendNotices(self._board.watch, len(processes), "", timeout, processes_of(process // members, members))
            for process in processes
        ]
        for edge in sorted(self._edges()):
            self._connect(edge, store)
        self._described = set[tuple[int, Edge]]()
        """The edges whose specs a process has sent or received."""
        self._begun = {process: 0 for process in processes}
        """The number of collectives that a process has begun."""
        self._meetings: defaultdict[tuple[int, int], SimulatedEvent] = defaultdict(lambda: SimulatedEvent(self._device))
        """By process and number: its stream has reached a collective."""
        self._meeting = threading.Lock()

    def run(self, segments: Sequence[Segment], announcing: int | None = None) -> list[str]:
        """Runs `segments` and returns the errors of the processes. Messages are announced in the first `announcing`
        segments; in all of them if it is None.
        """
        found: list[str] = []

        def run_process(process: int) -> None:
            try:
                with self._device.on(self._streams[process][0]):
                    for number, segment in enumerate(segments):
                        if number == announcing:
                            self._end_first_steps(process)
                        self._carry_out(process, self._schedule.row(process // self._members, segment))
            except Exception as error:
                found.append(f"process {process}: {error}")

        threads = [threading.Thread(target=run_process, args=(process,)) for process in self._streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def _end_first_steps(self, process: int) -> None:
        while self.notices[process].announcing:
            self.notices[process].begin_segment()

    def _carry_out(self, process: int, program: Sequence[Action]) -> None:
        self.notices[process].begin_segment()
        receives: defaultdict[Edge, deque[list[PendingMessage]]] = defaultdict(deque)
        for edge, action in self._exchanges(process, program):
            if isinstance(action, Receive):
                receives[edge].append([self._inboxes[edge].post(kind) for kind in self._kinds(process, edge)])
        for action in program:
            for edge, _ in self._exchanges(process, [action]):
                if isinstance(action, Send):
                    self._send(process, edge)
                else:
                    for receive in receives[edge].popleft():
                        receive.wait()
                    self._gather(process)
            if not isinstance(action, Send | Receive):
                self._gather(process)
                self._block(process, str(action))
                self._gather(process)

    def _kinds(self, process: int, edge: Edge) -> list[str]:
        """The kinds of the messages that make up the next one of `edge`."""
        if self._members == 1 or (process, edge) in self._described:
            return ["kind"]
        self._described.add((process, edge))
        return ["specs", "kind"]

    def _send(self, process: int, edge: Edge) -> None:
        for kind in self._kinds(process, edge):
            tensor = self._device.device_memory(LAYOUT, self._device.current())
            self._outboxes[edge].put(kind, (tensor,))
            if kind == "specs":
                self._gather(process)
                self._block(process, "the comparison of what crosses a cut")

    def _gather(self, process: int) -> None:
        """Enqueues a collective of the members of a rank, which ends when all have reached it."""
        if self._members == 1:
            return
        device, stream = self._device, self._streams[process][1]
        number, self._begun[process] = self._begun[process], self._begun[process] + 1
        with self._meeting:
            others = [self._meetings[other, number] for other in processes_of(process // self._members, self._members)]
        device.wait(stream, device.record_event(device.current()))
        device.pass_by(stream, others[process % self._members])
        for other in others:
            device.wait(stream, other)
        device.wait(device.current(), device.record_event(stream))

    def _block(self, process: int, doing: str) -> None:
        if not self._device.settle(self._streams[process], self._seconds):
            raise TimeoutError(f"{doing} waits for a device that waits for another rank")

    def _edges(self) -> set[Edge]:
        programs = self._schedule.program(1)
        rows = [(process, programs[process // self._members]) for process in self._streams]
        return {edge for process, row in rows for edge, _ in self._exchanges(process, row)}

    def _exchanges(self, process: int, program: Iterable[Action]) -> list[tuple[Edge, Action]]:
        found: list[tuple[Edge, Action]] = []
        rank, member = divmod(process, self._members)
        for action in program:
            if isinstance(action, Send | Receive):
                other = processes_of(peer(action, rank, self._schedule.placement), self._members)[member]
                ends = (process, other) if isinstance(action, Send) else (other, process)
                found.append((Edge(*ends), action))
        return found

    def _connect(self, edge: Edge, store: HashStore) -> None:
        group = SimulatedCommunicator(self._device)
        for process, other in ((edge.source, edge.target), (edge.target, edge.source)):
            stream: SimulatedStream = group.streams[process]
            self._streams[process].append(stream)
            timeout = Timeout(FailureBoard(store, process, len(self._streams)), self._seconds)
            options = EndpointOptions(
                edge=edge,
                group=group.end(process),
                peer=other,
                accelerator=self._device,
                receiving=self._idle[process],
                notices=self.notices[process],
                timeout=timeout,
                check=lambda: None,
            )
            if process == edge.source:
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


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_hosts_that_block_wherever_they_compute_do_not_deadlock(schedule: Schedule, seed: int) -> None:
    hosts = LazyHosts(schedule, seed, seconds=20.0)

    assert hosts.run([*(Step(minibatch) for minibatch in range(3)), Drain(3)]) == []
    assert all(notices.announcing for notices in hosts.notices)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_nor_do_tensor_parallel_members(schedule: Schedule) -> None:
    hosts = LazyHosts(schedule, 0, seconds=20.0, members=2)

    assert hosts.run([*(Step(minibatch) for minibatch in range(2)), Drain(2)]) == []


SEGMENTS = (*(Step(minibatch) for minibatch in range(6)), Drain(6))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("method", ["gpipe", "1f1b-flush", "zb-h1", "pipedream", "2bw"])
def test_some_schedules_need_no_notices(method: str, ranks: int) -> None:
    """Their ranks receive before they compute on."""
    hosts = LazyHosts(Schedule(method, ranks, 2 * ranks), 0, seconds=20.0)

    assert hosts.run(SEGMENTS, announcing=3) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s.method in ("interleaved", "spp", "zb-v")], ids=name)
def test_without_notices_others_deadlock(schedule: Schedule) -> None:
    """Enqueueing a receive when it is wanted is not enough: each rank's send waits for the other rank's receive."""
    found = LazyHosts(schedule, 0, seconds=1.0, members=schedule.ranks // 2).run(SEGMENTS, announcing=3)

    assert any("waits for a device that waits for another rank" in error for error in found)
