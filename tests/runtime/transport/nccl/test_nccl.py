"""What GPUs send each other: in the right order, whatever order they take, and with an end when one of them fails."""

import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore

from penstock.errors import TransportError
from penstock.runtime.devices.accelerators import Layout
from penstock.runtime.transport.backend_selection import (
    Backend,
    DeviceInfo,
    select_backends,
    sums_over_nccl,
    warn_of_sharing,
)
from penstock.runtime.transport.failures import FailureBoard
from penstock.runtime.transport.nccl.endpoints import AHEAD, EndpointOptions, NcclInbox, NcclOutbox
from penstock.runtime.transport.nccl.send_notices import SendNotices
from penstock.runtime.transport.nccl.watchdog import Watchdog
from penstock.runtime.transport.timeouts import Timeout
from penstock.runtime.transport.transport import Edge, PendingMessage
from support.jobs.staging_jobs import sum_over_nccl
from support.processes import Pool
from support.simulated.simulated_device import SimulatedDevice, SimulatedEvent, SimulatedStream
from support.simulated.simulated_nccl import SimulatedCommunicator

SEEDS = st.integers(0, 2**32)
FORWARD, BACKWARD = Edge(0, 1), Edge(1, 0)


LAYOUTS: dict[str, Layout] = {
    "small": (torch.Size((3,)), (1,), torch.float64),
    "transposed": (torch.Size((3, 5)), (1, 3), torch.float64),
    "empty": (torch.Size((0, 2)), (2, 1), torch.float64),
}


class Pair:
    """Two ranks that compute on a stream each, and an edge each way, by the communicators that carry them. `careful`:
    in their first steps.
    """

    def __init__(
        self, device: SimulatedDevice, shared: bool = False, seconds: float = 30.0, careful: bool = False
    ) -> None:
        self.device = device
        self.streams = device.stream(), device.stream()
        store = HashStore()
        self.boards = [FailureBoard(store, rank, 2) for rank in range(2)]
        self.timeout = [Timeout(board, seconds) for board in self.boards]
        self.watches = [Watchdog(timeout) for timeout in self.timeout]
        one = SimulatedCommunicator(device)
        self.communicators = {FORWARD: one, BACKWARD: one if shared else SimulatedCommunicator(device)}
        ends = {(edge, rank): group.end(rank) for edge, group in self.communicators.items() for rank in range(2)}
        if shared:
            ends = {(edge, rank): ends[FORWARD, rank] for edge, rank in ends}
        self.notices = [SendNotices(store, 2) for _ in range(2)]
        self.outboxes, self.inboxes = {}, {}
        for edge in self.communicators:
            sending, receiving = (
                EndpointOptions(
                    edge,
                    ends[edge, rank],
                    other,
                    device,
                    self.notices[rank],
                    self.timeout[rank],
                    self.watches[rank].check,
                )
                for rank, other in ((edge.source, edge.target), (edge.target, edge.source))
            )
            self.outboxes[edge], self.inboxes[edge] = NcclOutbox(sending), NcclInbox(receiving)
        if not careful:
            self._begin_to_train()

    def _begin_to_train(self) -> None:
        """All forms have been seen, some steps ago."""
        for edge in () if self.communicators[FORWARD] is self.communicators[BACKWARD] else (FORWARD, BACKWARD):
            for form, layout in LAYOUTS.items():
                self.send(edge, form, self.made(edge.source, 0.0, layout), None)
                with self.device.on(self.streams[edge.target]):
                    self.inboxes[edge].post(form).wait()
        self.device.finish()
        for notices in self.notices:
            while notices.careful:
                notices.begin()

    def made(self, rank: int, value: float, layout: Layout) -> Tensor:
        """A tensor that `rank` computes."""
        with self.device.on(self.streams[rank]):
            tensor = self.device.device_memory(layout, self.device.current())
            self.device.fill(tensor, value)
        return tensor

    def send(self, edge: Edge, form: str, *message: Tensor | None) -> None:
        with self.device.on(self.streams[edge.source]):
            self.outboxes[edge].put(form, message)


def exchange(device: SimulatedDevice, careful: bool) -> bool:
    """Both ranks post, send and drop messages of several forms; whether each read what was sent, laid out as it was."""
    pair, found, expected, values = Pair(device, careful=careful), [], [], iter(range(100))
    for form in tuple(LAYOUTS) * 3:
        tickets = {}
        for edge in (FORWARD, BACKWARD):
            value, layout = float(next(values)), LAYOUTS[form]
            with device.on(pair.streams[edge.target]):
                tickets[edge] = pair.inboxes[edge].post(form)
            pair.send(edge, form, pair.made(edge.source, value, layout), None)
            expected.append([value] * layout[0].numel())
        for edge, ticket in tickets.items():
            with device.on(pair.streams[edge.target]):
                tensor, nothing = ticket.wait()
                assert tensor is not None and nothing is None and not tensor.requires_grad
                assert (tensor.shape, tensor.stride()) == LAYOUTS[form][:2]
                found.append(device.read(tensor))
                del tensor
            del ticket
        tickets.clear()
    return not device.is_stuck() and found == expected


@settings(deadline=None, max_examples=50)
@given(SEEDS)
def test_messages_are_what_was_computed(seed: int) -> None:
    assert exchange(SimulatedDevice(seed), careful=False)


@settings(deadline=None, max_examples=15)
@given(SEEDS)
def test_messages_of_the_first_steps_are_what_was_computed(seed: int) -> None:
    assert exchange(SimulatedDevice(seed), careful=True)


class Hasty(SimulatedDevice):
    """Waits for no event."""

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        pass


def test_without_events_they_are_not() -> None:
    assert not all(exchange(Hasty(seed), careful=False) for seed in range(20))


def test_what_is_sent_is_kept_until_it_has_been_read() -> None:
    """And no longer than until the next message, or the end."""
    pair = Pair(SimulatedDevice(0))
    tensor = pair.made(0, 1.0, LAYOUTS["small"])
    kept = weakref.ref(tensor)
    pair.send(FORWARD, "small", tensor, None)
    del tensor

    assert pair.device.is_stuck() and pair.outboxes[FORWARD].underway.oldest() is not None and kept() is not None
    with pair.device.on(pair.streams[1]):
        pair.inboxes[FORWARD].post("small").wait()
    pair.device.finish()
    assert pair.outboxes[FORWARD].flushed(30.0)
    assert pair.outboxes[FORWARD].underway.oldest() is None and kept() is None


def test_two_directions_in_one_communicator_would_wait_for_each_other() -> None:
    """Each rank's send would come before the receive that the other one's send waits for."""

    def swap(shared: bool) -> bool:
        pair = Pair(SimulatedDevice(0), shared, seconds=0.2)
        for edge in (FORWARD, BACKWARD):
            pair.send(edge, "small", pair.made(edge.source, 1.0, LAYOUTS["small"]), None)
        try:
            for edge in (FORWARD, BACKWARD):
                with pair.device.on(pair.streams[edge.target]):
                    pair.inboxes[edge].post("small").wait()
        except TransportError:
            return False
        return not pair.device.is_stuck()

    assert swap(shared=False)
    assert not swap(shared=True)


def pile_up(careful: bool) -> tuple[Pair, list[PendingMessage]]:
    """Rank 0 has sent six messages, and rank 1 has posted the receives."""
    pair = Pair(SimulatedDevice(0), careful=careful)
    for number in range(6):
        pair.send(FORWARD, "small", pair.made(0, float(number), LAYOUTS["small"]), None)
    with pair.device.on(pair.streams[1]):
        return pair, [pair.inboxes[FORWARD].post("small") for _ in range(6)]


def test_a_receive_keeps_the_device_when_it_is_wanted() -> None:
    pair, tickets = pile_up(careful=False)
    assert pair.device.is_stuck()
    with pair.device.on(pair.streams[1]):
        pair.notices[1].look()
        assert pair.device.is_stuck() and pair.inboxes[FORWARD].underway.oldest() is None
        # Those before it are wanted, too.
        tickets[3].wait()
    assert pair.device.is_stuck()
    assert [ticket.ready() for ticket in tickets[:4]] == [True] * 4
    tickets[5].wait()
    assert not pair.device.is_stuck()


def test_in_the_first_steps_a_receive_is_told_of_when_its_message_is_on_its_way() -> None:
    pair, tickets = pile_up(careful=True)
    assert pair.device.is_stuck()
    with pair.device.on(pair.streams[1]):
        pair.notices[1].look()
    assert not pair.device.is_stuck()
    assert [ticket.ready() for ticket in tickets] == [True] * 6


def test_the_host_is_a_few_messages_ahead_of_its_device_and_no_more() -> None:
    """However long the other rank takes to receive them."""
    pair = Pair(SimulatedDevice(0))
    computed = []
    for number in range(3 * AHEAD):
        tensor = pair.made(0, float(number), LAYOUTS["small"])
        computed.append(pair.device.record(pair.streams[0]))
        pair.send(FORWARD, "small", tensor, None)
        assert [event.passed for event in computed[:-AHEAD]] == [True] * max(0, number - AHEAD + 1)


def test_what_was_received_is_held_by_nobody_else() -> None:
    """The work that brought it is not, as soon as the computing stream waits for it."""
    pair = Pair(SimulatedDevice(0))
    pair.send(FORWARD, "small", pair.made(0, 1.0, LAYOUTS["small"]), None)
    with pair.device.on(pair.streams[1]):
        tensor, _ = pair.inboxes[FORWARD].post("small").wait()
    assert tensor is not None and pair.inboxes[FORWARD].underway.oldest() is not None
    memory = weakref.ref(tensor.untyped_storage())
    del tensor
    gc.collect()

    assert memory() is None


def test_the_last_ticket_may_be_waited_for_first() -> None:
    pair, found = Pair(SimulatedDevice(0)), []
    with pair.device.on(pair.streams[1]):
        tickets = [pair.inboxes[FORWARD].post("small") for _ in range(5)]
    for number in range(5):
        pair.send(FORWARD, "small", pair.made(0, float(number), LAYOUTS["small"]), None)
    with pair.device.on(pair.streams[1]):
        for ticket in reversed(tickets):
            tensor, _ = ticket.wait()
            assert tensor is not None
            found.append(pair.device.read(tensor))
    pair.device.finish()

    assert found == [[float(number)] * 3 for number in (4, 3, 2, 1, 0)]


def ended(watch: Watchdog) -> TransportError:
    """The error that `watch` ends with; it comes within seconds, or the test ends."""
    for _ in range(3000):
        try:
            watch.check()
        except TransportError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("nothing ended")


def wait_for_nothing(pair: Pair) -> Callable[[], None]:
    """Rank 1 has received one message and waits for another one, which does not come; asks for one more."""
    pair.watches[1].over(str(FORWARD), pair.inboxes[FORWARD], pair.communicators[FORWARD].abort)
    pair.send(FORWARD, "small", pair.made(0, 1.0, LAYOUTS["small"]), None)
    with pair.device.on(pair.streams[1]):
        tickets = [pair.inboxes[FORWARD].post("small") for _ in range(3)]
        for ticket in tickets[:2]:
            ticket.wait()
    assert pair.device.is_stuck()
    pair.watches[1].start()
    return lambda: tickets[2].wait() and None  # type: ignore[return-value]


def test_a_gpu_that_waits_too_long_is_let_go_and_says_for_whom() -> None:
    pair = Pair(SimulatedDevice(0), seconds=0.5)
    go_on = wait_for_nothing(pair)
    error = ended(pair.watches[1])
    pair.watches[1].close()

    assert "nothing came from rank 0 for 0.5 s (rank 0 -> rank 1 (stages))" in str(error)
    assert pair.communicators[FORWARD].aborted and not pair.device.is_stuck()
    with pytest.raises(TransportError, match="nothing came from rank 0"):
        go_on()


def test_all_communicators_are_told_to_end_before_any_is_waited_for() -> None:
    """NCCL ends a communicator when its device is idle, which it is when the others have been told, too."""
    pair = Pair(SimulatedDevice(0), seconds=0.2)
    forward, backward = (pair.communicators[edge] for edge in (FORWARD, BACKWARD))
    forward.others, backward.others = [backward], [forward]
    pair.watches[1].over(str(BACKWARD), pair.outboxes[BACKWARD], backward.abort)
    wait_for_nothing(pair)
    error = ended(pair.watches[1])
    pair.watches[1].close()

    assert "nothing came from rank 0" in str(error)
    assert forward.aborted and backward.aborted and not pair.device.is_stuck()


def test_a_broken_connection_ends_the_wait_and_is_named() -> None:
    pair, broken = Pair(SimulatedDevice(0)), list[str]()
    inbox, communicator = pair.inboxes[FORWARD], pair.communicators[FORWARD]
    pair.watches[1].over(str(FORWARD), inbox, communicator.abort, lambda: "".join(broken))
    pair.watches[1].start()
    broken.append("NCCL: a remote error")
    error = ended(pair.watches[1])
    pair.watches[1].close()

    assert "rank 0 closed its connection to this rank (rank 0 -> rank 1 (stages))" in str(error)
    assert "NCCL: a remote error" in str(error) and communicator.aborted


def test_when_another_rank_fails_its_error_is_told() -> None:
    pair = Pair(SimulatedDevice(0))
    wait_for_nothing(pair)
    pair.boards[0].report("in a step", "ValueError: no more data", linger_seconds=0.0)
    error = ended(pair.watches[1])

    pair.watches[1].close()

    assert "rank 0 failed in a step" in str(error) and "ValueError: no more data" in str(error)
    assert not pair.device.is_stuck()


def test_who_waits_for_a_form_that_is_never_told_is_not_kept() -> None:
    pair = Pair(SimulatedDevice(0), seconds=0.2, careful=True)
    ticket = pair.inboxes[FORWARD].post("small")

    assert not ticket.ready()
    with pytest.raises(TransportError, match=r"nothing came from rank 0 for 0.2 s"):
        ticket.wait()


def test_who_has_nothing_underway_is_not_ended() -> None:
    pair = Pair(SimulatedDevice(0), seconds=0.01, careful=True)
    pair.watches[1].over(str(FORWARD), pair.inboxes[FORWARD], pair.communicators[FORWARD].abort)
    pair.watches[1].start()
    time.sleep(0.6)

    pair.watches[1].check()
    pair.watches[1].close()


GPUS = st.lists(
    st.builds(
        DeviceInfo,
        gpu=st.sampled_from(["", "a", "b", "c"]),
        wish=st.sampled_from(["", "0", "1"]),
        backend=st.sampled_from(["nccl", "xccl"]),
    ),
    min_size=2,
)
LANES = st.sampled_from(["stages", "reports", "buffers"])


@given(GPUS, st.data())
def test_edges_between_gpus_of_their_own_go_over_nccl(cards: list[DeviceInfo], data: st.DataObject) -> None:
    ranks = st.integers(0, len(cards) - 1)
    drawn = data.draw(st.lists(st.tuples(ranks, ranks, LANES), unique=True))
    edges = [Edge(source, target, lane) for source, target, lane in drawn if source != target]
    shared = set(data.draw(st.lists(st.sampled_from(edges)))) if edges else set()
    chosen = select_backends(edges, cards, shared)

    # All ranks make the communicators in this order.
    assert list(chosen) == edges
    for edge, carrier in chosen.items():
        one, other = cards[edge.source], cards[edge.target]
        assert (carrier is Backend.MEMORY) == (edge in shared)
        if carrier is Backend.NCCL:
            assert edge.lane == "stages" and one.gpu and other.gpu and "0" not in (one.wish, other.wish)
            assert one.gpu != other.gpu or one.wish == other.wish == "1"
            assert one.backend == other.backend
        elif carrier is Backend.GLOO and edge.lane == "stages" and one.gpu and other.gpu:
            assert one.gpu == other.gpu or "0" in (one.wish, other.wish) or one.backend != other.backend


def test_sums_go_over_nccl_where_every_rank_has_a_gpu() -> None:
    cards = [DeviceInfo(gpu, "") for gpu in ("a", "b", "c", "c", "")]

    assert sums_over_nccl((0, 1, 2), cards)
    assert not sums_over_nccl((0, 2, 3), cards)
    assert not sums_over_nccl((0, 4), cards)
    assert sums_over_nccl((2, 3), [card._replace(wish="1") for card in cards])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_on_a_stream_are_those_of_the_host(pool: Pool, ranks: int) -> None:
    for found in pool.run(ranks, sum_over_nccl, 3):
        assert found == [[float(ranks * number + sum(range(ranks)))] * 7 for number in range(3)]


def warnings_of(cards: list[DeviceInfo], caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the ranks of `cards` log."""
    caplog.clear()
    for rank in range(len(cards)):
        warn_of_sharing(cards, rank)
    return caplog.messages


def test_ranks_that_share_a_gpu_beside_an_idle_one_are_told(caplog: pytest.LogCaptureFixture) -> None:
    (told,) = warnings_of(
        [DeviceInfo(gpu, "", "here", 4) for gpu in "abaa"] + [DeviceInfo("c", "", "there", 1)] * 2, caplog
    )

    assert told.startswith("ranks 0, 2, 3 compute on one GPU (a on here), and 2 of the 4 GPUs there compute nothing")
    # None is left over, each has its own, or there is none.
    assert not warnings_of([DeviceInfo(gpu, "", "here", 2) for gpu in "abab"], caplog)
    assert not warnings_of([DeviceInfo(gpu, "", "here", 4) for gpu in "abc"], caplog)
    assert not warnings_of([DeviceInfo("", "", "here", 0)] * 2, caplog)
