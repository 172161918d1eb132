"""Messages between GPUs: ordered correctly in whatever order the streams progress, and ended when a rank fails."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore

from penstock.errors import PenstockError, TransportError
from penstock.runtime.collectives.failures import FailureBoard
from penstock.runtime.collectives.timeouts import Timeout
from penstock.runtime.devices.accelerators import ACCELERATORS, Layout
from penstock.runtime.devices.communicators import Communicator, Members
from penstock.runtime.transport.backend_selection import (
    NCCL,
    SHARED_MEMORY,
    Backend,
    DeviceInfo,
    select_backends,
    sums_over_nccl,
    warn_of_shared_gpus,
)
from penstock.runtime.transport.distributed_transport import DistributedTransport
from penstock.runtime.transport.nccl.endpoints import AHEAD, EndpointOptions, NcclInbox, NcclOutbox
from penstock.runtime.transport.nccl.send_notices import SendNotices
from penstock.runtime.transport.nccl.watchdog import Watchdog
from penstock.runtime.transport.transport import Channel, Edge, PendingMessage
from support.jobs.staging_jobs import sum_over_nccl
from support.processes import Pool
from support.simulated.simulated_device import SimulatedDevice, SimulatedEvent, SimulatedStream
from support.simulated.simulated_nccl import SimulatedCommunicator, SimulatedEnd

SEEDS = st.integers(0, 2**32)
FORWARD, BACKWARD = Edge(0, 1), Edge(1, 0)


LAYOUTS: dict[str, Layout] = {
    "small": (torch.Size((3,)), (1,), torch.float64),
    "transposed": (torch.Size((3, 5)), (1, 3), torch.float64),
    "empty": (torch.Size((0, 2)), (2, 1), torch.float64),
}


class Pair:
    """Two ranks that compute on one stream each, with an edge each way and its communicator. `announcing`: whether they
    are in their first steps.
    """

    def __init__(
        self, device: SimulatedDevice, shared: bool = False, seconds: float = 30.0, announcing: bool = False
    ) -> None:
        self.device = device
        self.streams = device.stream(), device.stream()
        self.store = store = HashStore()
        self.boards = [FailureBoard(store, rank, 2) for rank in range(2)]
        self.timeout = [Timeout(board, seconds) for board in self.boards]
        self.watchdogs = [Watchdog(timeout) for timeout in self.timeout]
        one = SimulatedCommunicator(device)
        self.communicators = {FORWARD: one, BACKWARD: one if shared else SimulatedCommunicator(device)}
        endpoints = {(edge, rank): group.end(rank) for edge, group in self.communicators.items() for rank in range(2)}
        if shared:
            endpoints = {(edge, rank): endpoints[FORWARD, rank] for edge, rank in endpoints}
        self.notices = [SendNotices(board.watch, 2, "", Timeout(board, seconds)) for board in self.boards]
        self.outboxes, self.inboxes = {}, {}
        idle = device.stream(), device.stream()
        for edge in self.communicators:
            sending, receiving = (
                EndpointOptions(
                    edge=edge,
                    group=endpoints[edge, rank],
                    peer=other,
                    accelerator=device,
                    receiving=idle[rank],
                    notices=self.notices[rank],
                    timeout=self.timeout[rank],
                    check=self.watchdogs[rank].check,
                )
                for rank, other in ((edge.source, edge.target), (edge.target, edge.source))
            )
            self.outboxes[edge], self.inboxes[edge] = NcclOutbox(sending), NcclInbox(receiving)
        if not announcing:
            self._send_all_kinds()

    def _send_all_kinds(self) -> None:
        """Ends the first steps, in which all kinds of messages are sent."""
        for edge in () if self.communicators[FORWARD] is self.communicators[BACKWARD] else (FORWARD, BACKWARD):
            for kind, layout in LAYOUTS.items():
                self.send(edge, kind, self.made(edge.source, 0.0, layout), None)
                with self.device.on(self.streams[edge.target]):
                    self.inboxes[edge].post(kind).wait()
        self.device.finish()
        self.end_first_steps()

    def end_first_steps(self) -> None:
        """Begins steps until nothing is announced."""
        for notices in self.notices:
            while notices.announcing:
                notices.begin_segment()

    def made(self, rank: int, value: float, layout: Layout) -> Tensor:
        """A tensor that `rank` computes."""
        with self.device.on(self.streams[rank]):
            tensor = self.device.device_memory(layout, self.device.current())
            self.device.fill(tensor, value)
        return tensor

    def send(self, edge: Edge, kind: str, *message: Tensor | None) -> None:
        with self.device.on(self.streams[edge.source]):
            self.outboxes[edge].put(kind, message)


def exchange(device: SimulatedDevice, announcing: bool) -> bool:
    """Both ranks post, send and drop messages of several kinds. Returns whether each read what was sent, with the same
    layout.
    """
    pair, found, expected, values = Pair(device, announcing=announcing), [], [], iter(range(100))
    for kind in tuple(LAYOUTS) * 3:
        receives = {}
        for edge in (FORWARD, BACKWARD):
            value, layout = float(next(values)), LAYOUTS[kind]
            with device.on(pair.streams[edge.target]):
                receives[edge] = pair.inboxes[edge].post(kind)
            pair.send(edge, kind, pair.made(edge.source, value, layout), None)
            expected.append([value] * layout[0].numel())
        for edge, receive in receives.items():
            with device.on(pair.streams[edge.target]):
                tensor, nothing = receive.wait()
                assert tensor is not None and nothing is None and not tensor.requires_grad
                assert (tensor.shape, tensor.stride()) == LAYOUTS[kind][:2]
                found.append(device.read(tensor))
                del tensor
            del receive
        receives.clear()
    return not device.is_stuck() and found == expected


@settings(deadline=None, max_examples=30)
@given(SEEDS, st.sampled_from([False, False, False, True]))
def test_messages_are_what_was_computed(seed: int, announcing: bool) -> None:
    """Also those of the first steps, which are announced."""
    assert exchange(SimulatedDevice(seed), announcing)


class Hasty(SimulatedDevice):
    """Does not wait for events."""

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        pass


def test_without_events_they_are_not() -> None:
    assert not all(exchange(Hasty(seed), announcing=False) for seed in range(20))


def test_what_is_sent_is_kept_until_it_has_been_read() -> None:
    """And no longer than until the next message, or the end."""
    pair = Pair(SimulatedDevice(0))
    tensor = pair.made(0, 1.0, LAYOUTS["small"])
    kept = weakref.ref(tensor)
    pair.send(FORWARD, "small", tensor, None)
    del tensor

    assert pair.device.is_stuck() and pair.outboxes[FORWARD].pending.oldest() is not None and kept() is not None
    with pair.device.on(pair.streams[1]):
        pair.inboxes[FORWARD].post("small").wait()
    pair.device.finish()
    assert pair.outboxes[FORWARD].flushed(30.0)
    assert pair.outboxes[FORWARD].pending.oldest() is None and kept() is None


@pytest.mark.parametrize("shared", [False, True])
def test_two_directions_in_one_communicator_would_wait_for_each_other(shared: bool) -> None:
    """Each rank's send would come before the receive that the other rank's send waits for."""
    # What is no deadlock has all the time that a busy machine takes.
    pair = Pair(SimulatedDevice(0), shared, seconds=0.2 if shared else 60.0)
    for edge in (FORWARD, BACKWARD):
        pair.send(edge, "small", pair.made(edge.source, 1.0, LAYOUTS["small"]), None)
    with pytest.raises(TransportError) if shared else nullcontext():
        for edge in (FORWARD, BACKWARD):
            with pair.device.on(pair.streams[edge.target]):
                pair.inboxes[edge].post("small").wait()

    assert pair.device.is_stuck() == shared


def pile_up(announcing: bool) -> tuple[Pair, list[PendingMessage]]:
    """Rank 0 has sent six messages, and rank 1 has posted the receives."""
    pair = Pair(SimulatedDevice(0), announcing=announcing)
    for number in range(6):
        pair.send(FORWARD, "small", pair.made(0, float(number), LAYOUTS["small"]), None)
    with pair.device.on(pair.streams[1]):
        return pair, [pair.inboxes[FORWARD].post("small") for _ in range(6)]


def test_a_receive_is_enqueued_when_it_is_wanted() -> None:
    pair, receives = pile_up(announcing=False)
    assert pair.device.is_stuck()
    with pair.device.on(pair.streams[1]):
        pair.notices[1].poll()
        assert pair.device.is_stuck() and pair.inboxes[FORWARD].pending.oldest() is None
        # The messages before it are wanted, too.
        receives[3].wait()
    assert pair.device.is_stuck()
    assert [receive.ready() for receive in receives[:4]] == [True] * 4
    receives[5].wait()
    assert not pair.device.is_stuck()


def test_a_tensor_on_the_cpu_is_refused_with_its_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("Tensors must be CUDA and dense")

    pair = Pair(SimulatedDevice(0))
    monkeypatch.setattr(SimulatedEnd, "send", refuse)
    with pytest.raises(PenstockError, match=r"a tensor on the CPU is among the messages rank 0 -> rank 1"):
        pair.send(FORWARD, "small", torch.zeros(3, dtype=torch.float64), None)


def test_a_message_arrives_while_its_receiver_computes() -> None:
    pair, computed = Pair(SimulatedDevice(0)), SimulatedEvent(SimulatedDevice(0))
    with pair.device.on(pair.streams[1]):
        # Nothing in the stream behind this computation is done before it is.
        pair.device.wait(pair.streams[1], computed)
        pair.send(FORWARD, "small", pair.made(0, 1.0, LAYOUTS["small"]), None)
        tensor, _ = pair.inboxes[FORWARD].post("small").wait()
        assert tensor is not None
        found = pair.device.read(tensor)
    assert pair.device.is_stuck()
    assert pair.outboxes[FORWARD].pending.oldest() is None and found == []
    computed.passed = True
    pair.device.finish()
    assert found == [1.0] * 3


def test_a_device_waits_for_a_message_without_tensors() -> None:
    """Such as the gradients for a stage whose weights are frozen."""
    pair, computed = Pair(SimulatedDevice(0)), SimulatedEvent(SimulatedDevice(0))
    for _ in range(2):
        pair.end_first_steps()
        pair.send(BACKWARD, "gradients", None)
        with pair.device.on(pair.streams[0]):
            assert pair.inboxes[BACKWARD].post("gradients").wait() == (None,)
        pair.device.wait(pair.streams[1], computed)
    with pair.device.on(pair.streams[0]):
        found = pair.device.read(pair.made(0, 1.0, LAYOUTS["small"]))
    assert pair.device.is_stuck() and found == []
    computed.passed = True
    pair.device.finish()
    assert found == [1.0] * 3


def test_in_the_first_steps_a_receive_is_enqueued_when_its_message_is_announced() -> None:
    pair, receives = pile_up(announcing=True)
    assert pair.device.is_stuck()
    with pair.device.on(pair.streams[1]):
        pair.notices[1].poll()
    assert not pair.device.is_stuck()
    assert [receive.ready() for receive in receives] == [True] * 6


def test_nothing_is_left_of_announcements() -> None:
    """A training of 64 ranks and 128 microbatches would leave a million of them to the process of the store."""
    pair, receives = pile_up(announcing=True)
    with pair.device.on(pair.streams[1]):
        for receive in receives:
            receive.wait()
    assert sum("message" in key for key in pair.store.list_keys()) == 6
    pair.notices[1].begin_segment()
    pair.boards[1].watch.ask(lambda store: None, 30.0)

    assert not any("message" in key for key in pair.store.list_keys())


def test_the_host_is_a_few_messages_ahead_of_its_device_and_no_more() -> None:
    """However long the other rank takes to receive them."""
    pair = Pair(SimulatedDevice(0))
    computed = []
    for number in range(3 * AHEAD):
        tensor = pair.made(0, float(number), LAYOUTS["small"])
        computed.append(pair.device.record_event(pair.streams[0]))
        pair.send(FORWARD, "small", tensor, None)
        assert [event.passed for event in computed[:-AHEAD]] == [True] * max(0, number - AHEAD + 1)


def test_a_received_tensor_is_not_kept_alive() -> None:
    """The work that received it does not keep it, as soon as the computing stream waits for the work."""
    pair = Pair(SimulatedDevice(0))
    pair.send(FORWARD, "small", pair.made(0, 1.0, LAYOUTS["small"]), None)
    with pair.device.on(pair.streams[1]):
        tensor, _ = pair.inboxes[FORWARD].post("small").wait()
    assert tensor is not None and pair.inboxes[FORWARD].pending.oldest() is not None
    memory = weakref.ref(tensor.untyped_storage())
    del tensor
    gc.collect()

    assert memory() is None


def test_the_last_receive_may_be_waited_for_first() -> None:
    pair, found = Pair(SimulatedDevice(0)), []
    with pair.device.on(pair.streams[1]):
        receives = [pair.inboxes[FORWARD].post("small") for _ in range(5)]
    for number in range(5):
        pair.send(FORWARD, "small", pair.made(0, float(number), LAYOUTS["small"]), None)
    with pair.device.on(pair.streams[1]):
        for receive in reversed(receives):
            tensor, _ = receive.wait()
            assert tensor is not None
            found.append(pair.device.read(tensor))
    pair.device.finish()

    assert found == [[float(number)] * 3 for number in (4, 3, 2, 1, 0)]


def ended(watched: Watchdog | DistributedTransport) -> TransportError:
    """Waits for the error of what is `watched`, which comes within seconds."""
    for _ in range(3000):
        try:
            watched.check()
        except TransportError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("nothing ended")


def wait_for_nothing(pair: Pair) -> Callable[[], None]:
    """Rank 1 has received one message and waits for another one, which does not come. Returns a function that waits for
    a third.
    """
    pair.watchdogs[1].watch(str(FORWARD), pair.inboxes[FORWARD], pair.communicators[FORWARD].abort)
    pair.send(FORWARD, "small", pair.made(0, 1.0, LAYOUTS["small"]), None)
    with pair.device.on(pair.streams[1]):
        receives = [pair.inboxes[FORWARD].post("small") for _ in range(3)]
        for receive in receives[:2]:
            receive.wait()
    assert pair.device.is_stuck()
    pair.watchdogs[1].start()
    return lambda: receives[2].wait() and None  # type: ignore[return-value]


def test_a_gpu_that_waits_too_long_is_released_and_the_peer_is_named() -> None:
    pair = Pair(SimulatedDevice(0), seconds=0.5)
    go_on = wait_for_nothing(pair)
    error = ended(pair.watchdogs[1])
    pair.watchdogs[1].close()

    assert "nothing came from rank 0 for 0.5 s (rank 0 -> rank 1 (stages))" in str(error)
    assert pair.communicators[FORWARD].aborted and not pair.device.is_stuck()
    with pytest.raises(TransportError, match="nothing came from rank 0"):
        go_on()


def test_a_send_may_be_pending_while_the_user_does_something_else() -> None:
    """Under `2bw` the other rank receives it in its next step, and both may evaluate the model for an hour before."""
    pair = Pair(SimulatedDevice(0), seconds=0.3)
    watchdog, board = pair.watchdogs[0], pair.boards[0]
    watchdog.watch(str(FORWARD), pair.outboxes[FORWARD], pair.communicators[FORWARD].abort)
    pair.send(FORWARD, "small", pair.made(0, 1.0, LAYOUTS["small"]), None)
    assert pair.device.is_stuck()
    watchdog.start()
    time.sleep(1.0)
    watchdog.check()
    board.watch.doing = "in a step", time.monotonic()

    assert "nothing came from rank 1 for 0.3 s (rank 0 -> rank 1 (stages))" in str(ended(watchdog))
    watchdog.close()


def test_all_aborts_are_started_before_any_is_waited_for() -> None:
    """NCCL ends a communicator when its device is idle, and so only when the others are being aborted as well."""
    pair = Pair(SimulatedDevice(0), seconds=0.2)
    forward, backward = (pair.communicators[edge] for edge in (FORWARD, BACKWARD))
    forward.others, backward.others = [backward], [forward]
    pair.watchdogs[1].watch(str(BACKWARD), pair.outboxes[BACKWARD], backward.abort)
    wait_for_nothing(pair)
    error = ended(pair.watchdogs[1])
    pair.watchdogs[1].close()

    assert "nothing came from rank 0" in str(error)
    assert forward.aborted and backward.aborted and not pair.device.is_stuck()


def test_a_broken_connection_ends_the_wait_and_is_named() -> None:
    pair, broken = Pair(SimulatedDevice(0)), list[str]()
    inbox, communicator = pair.inboxes[FORWARD], pair.communicators[FORWARD]
    pair.watchdogs[1].watch(str(FORWARD), inbox, communicator.abort, lambda: "".join(broken))
    pair.watchdogs[1].start()
    broken.append("NCCL: a remote error")
    error = ended(pair.watchdogs[1])
    pair.watchdogs[1].close()

    assert "rank 0 closed its connection to this rank (rank 0 -> rank 1 (stages))" in str(error)
    assert "NCCL: a remote error" in str(error) and communicator.aborted


def test_a_look_finds_a_broken_connection_before_the_watchdog_does() -> None:
    """What such a connection has received must not be taken for the numbers of its sender."""
    pair = Pair(SimulatedDevice(0))
    communicator = pair.communicators[FORWARD]
    pair.watchdogs[1].watch(str(FORWARD), pair.inboxes[FORWARD], communicator.abort, lambda: "NCCL: a remote error")

    with pytest.raises(TransportError, match="rank 0 closed its connection to this rank"):
        pair.watchdogs[1].look()
    assert communicator.aborted


def test_when_another_rank_fails_its_error_is_raised() -> None:
    pair = Pair(SimulatedDevice(0))
    wait_for_nothing(pair)
    pair.boards[0].report("in a step", "ValueError: no more data", linger_seconds=0.0)
    error = ended(pair.watchdogs[1])

    pair.watchdogs[1].close()

    assert "rank 0 failed in a step" in str(error) and "ValueError: no more data" in str(error)
    assert not pair.device.is_stuck()


def test_a_wait_for_a_kind_that_is_never_announced_times_out() -> None:
    pair = Pair(SimulatedDevice(0), seconds=0.2, announcing=True)
    receive = pair.inboxes[FORWARD].post("small")

    assert not receive.ready()
    with pytest.raises(TransportError, match=r"nothing came from rank 0 for 0.2 s"):
        receive.wait()


def test_an_idle_endpoint_does_not_time_out() -> None:
    pair = Pair(SimulatedDevice(0), seconds=0.01, announcing=True)
    pair.watchdogs[1].watch(str(FORWARD), pair.inboxes[FORWARD], pair.communicators[FORWARD].abort)
    pair.watchdogs[1].start()
    time.sleep(0.6)

    pair.watchdogs[1].check()
    pair.watchdogs[1].close()


GPUS = st.lists(
    st.builds(
        DeviceInfo,
        gpu=st.sampled_from(["", "a", "b", "c"]),
        nccl_setting=st.sampled_from(["", "0", "1"]),
        backend=st.sampled_from(["nccl", "xccl"]),
    ),
    min_size=2,
)
CHANNELS = st.sampled_from([Channel.STAGES, Channel.REPORTS, Channel.BUFFERS])


@given(GPUS, st.data())
def test_edges_between_gpus_of_their_own_go_over_nccl(devices: list[DeviceInfo], data: st.DataObject) -> None:
    ranks = st.integers(0, len(devices) - 1)
    drawn = data.draw(st.lists(st.tuples(ranks, ranks, CHANNELS), unique=True))
    edges = [Edge(source, target, channel) for source, target, channel in drawn if source != target]
    shared = set(data.draw(st.lists(st.sampled_from(edges)))) if edges else set()
    chosen = select_backends(edges, devices, shared)

    # All ranks make the communicators in this order.
    assert list(chosen) == edges
    for edge, backend in chosen.items():
        one, other = devices[edge.source], devices[edge.target]
        assert (backend is Backend.MEMORY) == (edge in shared)
        if backend is Backend.NCCL:
            assert (
                edge.channel == Channel.STAGES
                and one.gpu
                and other.gpu
                and "0" not in (one.nccl_setting, other.nccl_setting)
            )
            assert one.gpu != other.gpu or one.nccl_setting == other.nccl_setting == "1"
            assert one.backend == other.backend
        elif backend is Backend.GLOO and edge.channel == Channel.STAGES and one.gpu and other.gpu:
            assert one.gpu == other.gpu or "0" in (one.nccl_setting, other.nccl_setting) or one.backend != other.backend


def test_sums_go_over_nccl_where_every_rank_has_a_gpu() -> None:
    devices = [DeviceInfo(gpu, "") for gpu in ("a", "b", "c", "c", "")]

    assert sums_over_nccl((0, 1, 2), devices)
    assert not sums_over_nccl((0, 2, 3), devices)
    assert not sums_over_nccl((0, 4), devices)
    assert sums_over_nccl((2, 3), [device._replace(nccl_setting="1") for device in devices])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_on_a_stream_are_those_of_the_host(pool: Pool, ranks: int) -> None:
    for found in pool.run(ranks, sum_over_nccl, 3):
        assert found == [[float(ranks * number + sum(range(ranks)))] * 7 for number in range(3)]


def warnings_of(devices: list[DeviceInfo], caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the ranks of `devices` log."""
    caplog.clear()
    for rank in range(len(devices)):
        warn_of_shared_gpus(devices, rank)
    return caplog.messages


def test_ranks_that_share_a_gpu_beside_an_idle_one_are_warned(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(
        [DeviceInfo(gpu, "", "here", 4) for gpu in "abaa"] + [DeviceInfo("c", "", "there", 1)] * 2, caplog
    )

    assert warning.startswith("ranks 0, 2, 3 compute on one GPU (a on here), and 2 of the 4 GPUs there compute nothing")
    # No GPU is unused, each rank has its own, or there are none.
    for gpus, there in (("abab", 2), ("abc", 4), (["", ""], 0)):
        assert not warnings_of([DeviceInfo(gpu, "", "here", there) for gpu in gpus], caplog)


class Unconnected(SimulatedDevice):
    """A device whose communicators wait for a member that never comes."""

    backend = "nccl"

    def communicator(self, members: Members, ctas: int) -> Communicator:
        threading.Event().wait()
        raise AssertionError


class Sharing(SimulatedDevice):
    """A device whose communicators tell what broke them, as Gloo's cannot."""

    backend = "nccl"

    def failure(self, communicator: Communicator) -> str:
        raise AssertionError("asked a communicator of the host")


def test_a_mesh_over_gloo_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACCELERATORS, "cpu", lambda device: Sharing(0))
    store = HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    gloo = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=30))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    board, device = FailureBoard(store, 0, 1), torch.device("cpu")
    transport = DistributedTransport(
        (), 0, 1, device, store, "one", Timeout(board, 5.0), lambda value: [value], mesh_groups=(group,)
    )
    transport.check()
    transport.close()


class Connected(SimulatedDevice):
    """A device whose communicators another process takes part in, which never aborts its own."""

    backend = "nccl"

    def __init__(self) -> None:
        super().__init__(0)
        self.made: list[SimulatedCommunicator] = []

    def communicator(self, members: Members, ctas: int) -> Communicator:
        self.made.append(SimulatedCommunicator(self))
        return cast(Communicator, self.made[-1].end(members.rank))


class MeshGroup:
    """The group of a mesh, and its backend."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.communicator = SimulatedCommunicator(device)
        self.abort = self.communicator.abort

    def name(self) -> str:
        return "nccl"

    def _get_backend(self, device: torch.device) -> "MeshGroup":
        return self


def test_the_groups_of_a_mesh_end_with_the_other_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL ends none of them as long as the device waits in a collective of the mesh, whose other member has died."""
    device, store = Connected(), HashStore()
    mesh: Any = MeshGroup(device)
    monkeypatch.setenv(SHARED_MEMORY, "0")
    monkeypatch.setitem(ACCELERATORS, "cpu", lambda _: device)
    monkeypatch.setitem(dist.distributed_c10d._world.pg_group_ranks, mesh, {0: 0, 1: 1})
    board, cpu = FailureBoard(store, 0, 2), torch.device("cpu")
    monkeypatch.setenv(NCCL, "1")
    transport = DistributedTransport(
        (FORWARD,), 0, 2, cpu, store, "one", Timeout(board, 60.0), lambda value: [value, value], mesh_groups=(mesh,)
    )
    (edge,) = device.made
    edge.others, mesh.communicator.others = [mesh.communicator], [edge]
    FailureBoard(store, 1, 2).report("in a step", "ValueError: no more data", linger_seconds=0.0)

    assert "ValueError: no more data" in str(ended(transport))
    # The mesh is aborted after the edge, by the same thread.
    deadline = time.monotonic() + 60
    while not mesh.communicator.aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert edge.aborted and mesh.communicator.aborted
    transport.close()


def test_connecting_ends_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_MEMORY, "0")
    monkeypatch.setenv(NCCL, "1")
    monkeypatch.setitem(ACCELERATORS, "cpu", lambda device: Unconnected(0))
    store, cpu = HashStore(), torch.device("cpu")
    arguments = (cpu, store, "one", Timeout(FailureBoard(store, 0, 2), 0.3), lambda value: [value, value])

    with pytest.raises(TransportError, match=r"rank 1 for 0.3 s \(connecting penstock rank 0 -> rank 1"):
        DistributedTransport((FORWARD,), 0, 2, *arguments)
