"""Messages arrive in order and completely, and their shapes are agreed on once."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.transport.distributed_transport import arrange
from penstock.runtime.transport.transport import Edge, LoopbackTransport
from support.jobs.transport_jobs import (
    close_before_it_comes,
    connect_in_a_bound_world,
    exchange,
    exchange_changed_shapes,
    exchange_layouts,
    exchange_sizes,
    in_layouts,
    leave_messages,
    list_communicators,
    list_threads,
    pile_up,
    read_in_any_order,
    wait_for_a_late_message,
)
from support.processes import Pool

BOTH = pytest.mark.parametrize("shared", [True, False], ids=["shared-memory", "gloo"])


def test_loopback_keeps_the_order_of_an_edge() -> None:
    transport = LoopbackTransport()
    edge, back = Edge(0, 1), Edge(1, 0)
    early = transport.post(edge, "kind")
    late = transport.post(edge, "kind")

    assert not early.ready()
    transport.send(edge, "kind", (torch.tensor(1.0),))
    assert early.ready() and not late.ready()
    transport.send(edge, "kind", (torch.tensor(2.0), None))
    transport.send(back, "kind", (torch.tensor(3.0),))
    assert [tensor if tensor is None else tensor.item() for tensor in late.wait()] == [2.0, None]
    assert [tensor.item() for tensor in early.wait()] == [1.0]
    assert [tensor.item() for tensor in transport.post(back, "kind").wait()] == [3.0]


def test_loopback_cuts_the_graph_and_keeps_the_gradient_flag() -> None:
    transport = LoopbackTransport()
    leaf = torch.ones(2, requires_grad=True)
    transport.send(Edge(0, 1), "kind", (leaf * 2, torch.ones(2)))
    needs, does_not = transport.post(Edge(0, 1), "kind").wait()

    assert needs.requires_grad and needs.is_leaf
    assert not does_not.requires_grad


@BOTH
@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_receive_what_was_sent(pool: Pool, ranks: int, shared: bool) -> None:
    for rank, found in enumerate(pool.run(ranks, exchange, shared)):
        source = (rank - 1) % ranks

        assert found == [
            ([source, 0, "torch.int64", False], None, [0.5, "torch.float32", True]),
            ([source, 1, "torch.int64", False], None, [1.5, "torch.float32", True]),
            ([source, 2, "torch.bfloat16", False], [[], "torch.float64", False]),
            ([source, 3, "torch.int64", False], None, [3.5, "torch.float32", True]),
        ]


@BOTH
def test_tensors_lie_in_memory_as_they_did(pool: Pool, shared: bool) -> None:
    _, found = pool.run(2, exchange_layouts, shared)
    sent = in_layouts()

    assert len({tensor.stride() for tensor in sent}) == 5
    assert len(found) == 2 * len(sent)
    for index, (tensor, strides) in enumerate(found):
        one = sent[index % len(sent)]
        assert torch.equal(tensor, one)
        # A layer makes its results in the memory order of its input, without the gaps.
        assert strides == torch.empty_like(one).stride()


@BOTH
def test_shapes_that_depend_on_the_data_are_refused(pool: Pool, shared: bool) -> None:
    sender, _ = pool.run(2, exchange_changed_shapes, shared)

    assert sender == (
        "rank 0 -> rank 1 (stages): microbatches of the same input shapes must make tensors of the same shapes. "
        "Agreed at "
        "the first one: [(2,) torch.float32]; now: [(3,) torch.float32]. The model's shapes or used outputs depend on "
        "its "
        "data: make them depend on the input shapes only"
    )


def test_processes_of_one_host_share_memory_without_threads(pool: Pool) -> None:
    assert pool.run(3, list_threads, None) == [[], [], []]


@pytest.mark.parametrize("refused", [False, True], ids=["disabled", "refused"])
def test_a_process_without_shared_memory_uses_gloo(pool: Pool, refused: bool) -> None:
    first, second, third = pool.run(3, list_threads, 0, refused)

    assert first == ["penstock receive rank 2 -> rank 0 (stages)", "penstock send rank 0 -> rank 1 (stages)"]
    assert second == ["penstock receive rank 0 -> rank 1 (stages)"]
    assert third == ["penstock send rank 2 -> rank 0 (stages)"]


def test_every_directed_edge_has_a_communicator_of_its_two_ranks(pool: Pool) -> None:
    """They are made in rounds, in which ranks cannot wait for each other in a circle, and are released by all ranks
    together.
    """
    first, second, third = pool.run(3, list_communicators, ((0, 2), (2, 1, 0)))

    assert first == (
        [
            "penstock rank 0 -> rank 1 (stages)",
            "penstock rank 1 -> rank 0 (stages)",
            "penstock the sum over ranks [0, 2]",
            "penstock the sum over ranks [2, 1, 0]",
        ],
        0,
    )
    assert second == (
        [
            "penstock rank 0 -> rank 1 (stages)",
            "penstock rank 1 -> rank 0 (stages)",
            "penstock rank 1 -> rank 2 (stages)",
            "penstock rank 2 -> rank 1 (stages)",
            "penstock the sum over ranks [2, 1, 0]",
        ],
        0,
    )
    assert third == (
        [
            "penstock rank 1 -> rank 2 (stages)",
            "penstock rank 2 -> rank 1 (stages)",
            "penstock the sum over ranks [0, 2]",
            "penstock the sum over ranks [2, 1, 0]",
        ],
        0,
    )


def test_a_world_bound_to_a_device_is_not_split(pool: Pool) -> None:
    """As ``init_process_group("nccl", device_id=...)`` makes it. Only its members make a communicator."""
    assert pool.run(3, connect_in_a_bound_world) == ["connected"] * 3


@settings(deadline=None)
@given(st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=4)))
def test_connections_in_rounds_are_disjoint(connections: list[set[int]]) -> None:
    numbered = list(enumerate(connections))
    rounds = arrange(numbered, lambda connection: connection[1])

    assert sorted(number for disjoint in rounds for number, _ in disjoint) == list(range(len(connections)))
    for disjoint in rounds:
        attending = [member for _, members in disjoint for member in members]
        assert len(attending) == len(set(attending))


@pytest.mark.parametrize("ranks", [2, 3, 4, 64])
def test_a_line_of_ranks_connects_in_four_rounds(ranks: int) -> None:
    line = [(rank, rank + 1) for rank in range(ranks - 1)]
    edges = [edge for one, other in line for edge in (Edge(one, other), Edge(other, one))]

    assert len(arrange(edges, lambda edge: (edge.source, edge.target))) == min(4, 2 * (ranks - 1))


@BOTH
def test_messages_of_all_sizes_come_as_they_were_sent(pool: Pool, shared: bool) -> None:
    _, found = pool.run(2, exchange_sizes, shared)

    assert found == [True] * 24


@BOTH
def test_a_send_never_waits_for_its_receiver(pool: Pool, shared: bool) -> None:
    _, found = pool.run(2, pile_up, shared)

    assert found == [number + 0.5 for number in range(50)]


@BOTH
def test_receives_need_not_be_waited_for_in_order_nor_at_all(pool: Pool, shared: bool) -> None:
    _, found = pool.run(2, read_in_any_order, shared)

    assert found == [3.0, 1.0, 19.0, 3.0]


@BOTH
@pytest.mark.parametrize("asks", [False, True], ids=["another kind", "asked for before"])
def test_waiting_for_a_message_does_not_wait_for_the_next_one(pool: Pool, shared: bool, asks: bool) -> None:
    _, found = pool.run(2, wait_for_a_late_message, shared, asks)

    assert found == [0.0, 1.0, 2.0]


@BOTH
def test_what_was_sent_is_delivered_after_the_sender_has_left(pool: Pool, shared: bool) -> None:
    _, (first, second, *error) = pool.run(2, leave_messages, shared)

    assert (first, second) == (1.0, 2.0)
    if shared:
        assert error[0].startswith("rank 0 closed its connection to this rank (rank 0 -> rank 1 (stages)).")
        assert error[0].endswith("The connection says: it was closed by the other end")


@BOTH
def test_what_was_posted_still_comes_when_the_receiver_closes(pool: Pool, shared: bool) -> None:
    _, found = pool.run(2, close_before_it_comes, shared)

    assert found == [5.0]


def test_nothing_is_left_behind(pool: Pool) -> None:
    before = sorted(os.listdir("/dev/shm"))
    pool.run(3, exchange, True)

    assert sorted(os.listdir("/dev/shm")) == before
    assert "@penstock-" not in Path("/proc/net/unix").read_text()
