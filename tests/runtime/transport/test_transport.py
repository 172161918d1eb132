"""Messages arrive in order and completely, and their shapes are agreed on once."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import TransportError
from penstock.runtime.transport.connections import arrange
from penstock.runtime.transport.transport import Edge, LoopbackTransport, Transport
from penstock.runtime.transport.worlds import join_world
from support.processes import Pool
from support.simulated.stream_races import RacingDevice, on_streams
from support.simulated.tardy_backend import LIVE
from support.transport_selection import sharing_memory

BOTH = pytest.mark.parametrize("shared", [True, False], ids=["shared-memory", "gloo"])


def _ring(shared: bool = True) -> tuple[Transport, int, int]:
    """Makes a transport along the ring of ranks, through shared memory or not."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    edges = [Edge(source, (source + 1) % ranks) for source in range(ranks)]
    with sharing_memory(shared):
        return join_world().connect(edges, torch.device("cpu"), 30.0), rank, ranks


def _refuse(*_: object) -> NoReturn:
    raise PermissionError("not on this machine")


def list_communicators(groups: tuple[tuple[int, ...], ...]) -> tuple[list[str], int]:
    """The communicators between devices that this rank makes, in order, and the number that is left at the end. It has
    edges both ways along a line of ranks, and sums over `groups`.
    """
    ranks = dist.get_world_size()
    line = [(rank, rank + 1) for rank in range(ranks - 1)]
    edges = [edge for one, other in line for edge in (Edge(one, other), Edge(other, one))]
    before = len(LIVE)
    with sharing_memory(False), on_streams(RacingDevice(tardy=True)):
        transport = join_world().connect(edges, torch.device("cpu"), 30.0, groups)
        made = [communicator.name for communicator in LIVE[before:]]
        transport.close()
    return made, len(LIVE) - before


def connect_in_a_bound_world() -> str:
    """Makes edges and sums of some ranks while the default group is bound to a device, and returns the error. There, a
    process that makes a process group without being its member splits the communicator of the default group, which is a
    collective of all ranks.
    """
    world = dist.distributed_c10d._get_default_group()
    world.bound_device_id = torch.device("cuda", 0)
    try:
        with sharing_memory(False):
            transport = join_world().connect([Edge(0, 1), Edge(1, 2)], torch.device("cpu"), 30.0, [(0, 2)])
        transport.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "connected"


def list_threads(excluded: int | None, refused: bool = False) -> list[str]:
    """The threads that the transport needs. The rank `excluded` has shared memory disabled, or is `refused` it."""
    before = set(threading.enumerate())
    made, out = os.memfd_create, dist.get_rank() == excluded
    os.memfd_create = _refuse if out and refused else made  # type: ignore[assignment]
    try:
        transport, rank, ranks = _ring(not out or refused)
    finally:
        os.memfd_create = made
    transport.send(Edge(rank, (rank + 1) % ranks), "kind", (torch.ones(1),))
    transport.post(Edge((rank - 1) % ranks, rank), "kind").wait()
    # Every process has one thread that calls the store.
    names = sorted({thread.name for thread in set(threading.enumerate()) - before} - {"penstock store"})
    transport.close()
    return names


def pile_up(shared: bool) -> list[float]:
    """Rank 0 sends fifty messages, of up to 200 kB, before rank 1 reads the first one."""
    transport, rank, _ = _ring(shared)
    edge, sizes = Edge(0, 1), [1000 * (number % 7) ** 2 for number in range(50)]
    found = []
    if rank == 0:
        for number, size in enumerate(sizes):
            transport.send(edge, ("kind", size), (torch.full((size,), float(number)), torch.tensor(number + 0.5)))
        dist.barrier()
        transport.flush()
    else:
        dist.barrier()
        for number, size in enumerate(sizes):
            many, one = transport.post(edge, ("kind", size)).wait()
            assert many is not None and one is not None
            assert torch.equal(many, torch.full((size,), float(number)))
            found.append(one.item())
    transport.close()
    return found


def read_in_any_order(shared: bool) -> list[float]:
    """Rank 1 posts twenty receives and waits for a few of them. Rank 0 can still send everything."""
    transport, rank, _ = _ring(shared)
    edge, found = Edge(0, 1), []
    if rank == 0:
        for number in range(20):
            transport.send(edge, "kind", (torch.full((20_000,), float(number)),))
        dist.barrier()
        transport.flush()
    else:
        receives = [transport.post(edge, "kind") for _ in range(20)]
        dist.barrier()
        for number in (3, 1, 19, 3):
            (tensor,) = receives[number].wait()
            assert tensor is not None and receives[number].ready()
            found.append(tensor[-1].item())
    dist.barrier()
    transport.close()
    return found


def wait_for_a_late_message(shared: bool, asks: bool) -> list[float]:
    """Rank 1 waits for messages that come late, after it has posted later ones, which rank 0 sends only when the
    earlier ones have been acknowledged. The later ones are of an unknown kind, or of the same kind if it `asks` whether
    they have arrived.
    """
    transport, rank, _ = _ring(shared)
    forward, back, found = Edge(0, 1), Edge(1, 0), []
    later = "kind" if asks else "another kind"
    for number, kind in enumerate(("kind", "kind", later)):
        if rank == 0:
            # Longer than a waiter spins before a thread waits in its stead.
            time.sleep(0.05)
            transport.send(forward, kind, (torch.full((100,), float(number)),))
            transport.post(back, "acknowledged").wait()
            continue
        if number < 2:
            receive = transport.post(forward, kind)
        if number == 1:
            last = transport.post(forward, later)
            assert not (asks and last.ready())
        (tensor,) = (last if number == 2 else receive).wait()
        assert tensor is not None
        found.append(tensor[-1].item())
        transport.send(back, "acknowledged", (torch.ones(1),))
    dist.barrier()
    transport.close()
    return found


def exchange_sizes(shared: bool) -> list[bool]:
    """Rank 0 sends messages from nothing to 4 MB, one with a header of more than a page and one with the sentinel of a
    message that has not arrived. Rank 1 receives three of each. Returns whether each is what was sent.
    """
    transport, rank, _ = _ring(shared)
    edge, found = Edge(0, 1), []
    for repetition in range(3):
        for number, message in enumerate(_of_all_sizes(repetition)):
            if rank == 0:
                transport.send(edge, number, message)
                continue
            got = transport.post(edge, number).wait()
            pairs = list(zip(got, message, strict=True))
            found.append(all(a is None if b is None else a is not None and torch.equal(a, b) for a, b in pairs))
    if rank == 0:
        transport.flush()
    dist.barrier()
    transport.close()
    return found


def _of_all_sizes(number: int) -> list[tuple[Tensor | None, ...]]:
    large = torch.arange(2**20, dtype=torch.float32) + number
    return [
        (torch.tensor([number], dtype=torch.uint8),),
        (None, None),
        (torch.empty(0), torch.full((3,), number, dtype=torch.int16)),
        tuple(torch.full((index % 5,), float(number)) for index in range(300)),
        (large,),
        (torch.tensor([0x7FF49E570C4BED1D + 0 * number]),),
        (torch.tensor(float(number)), large.view(1024, 1024).t()),
        (torch.full((64,), number, dtype=torch.float64), torch.tensor(True)),
    ]


def close_before_it_comes(shared: bool) -> list[float]:
    """Rank 1 closes its transport before rank 0 sends a message whose receive rank 1 has posted."""
    transport, rank, _ = _ring(shared)
    found = []
    if rank == 0:
        time.sleep(0.1)
        transport.send(Edge(0, 1), "kind", (torch.tensor(5.0),))
        transport.flush()
        transport.close()
    else:
        receive = transport.post(Edge(0, 1), "kind")
        transport.close()
        found = [tensor.item() for tensor in receive.wait() if tensor is not None]
    return found


def leave_messages(shared: bool) -> list[Any]:
    """Rank 0 sends two messages and closes its transport. Rank 1 reads them, and waits for a third."""
    transport, rank, _ = _ring(shared)
    edge, found = Edge(0, 1), []
    if rank == 0:
        transport.send(edge, "kind", (torch.tensor(1.0),))
        transport.send(edge, "kind", (torch.tensor(2.0),))
        for act in (transport.close, dist.barrier) if shared else (dist.barrier, transport.flush, transport.close):
            act()
        return found
    dist.barrier()
    receives = [transport.post(edge, "kind") for _ in range(3 if shared else 2)]
    found = [tensor.item() for receive in receives[:2] for tensor in receive.wait() if tensor is not None]
    if shared:
        try:
            receives[2].wait()
        except TransportError as error:
            found.append(str(error))
    transport.close()
    return found


def exchange(shared: bool) -> list[Any]:
    """Each rank sends four messages of two kinds to the next one, and returns what it received."""
    transport, rank, ranks = _ring(shared)
    source, target = Edge((rank - 1) % ranks, rank), Edge(rank, (rank + 1) % ranks)
    kinds = ("long", "long", "short", "long")
    receives = [transport.post(source, kind) for kind in kinds]
    for number, kind in enumerate(kinds):
        head = torch.tensor([rank, number])
        if kind == "long":
            weight = torch.tensor(number + 0.5, requires_grad=True)
            transport.send(target, kind, (head, None, weight))
        else:
            transport.send(target, kind, (head.bfloat16(), torch.empty(0, dtype=torch.float64)))
    found = []
    for receive in receives:
        head, *rest = receive.wait()  # type: ignore[assignment]
        assert head is not None
        message = [[*head.tolist(), str(head.dtype), head.requires_grad]]
        for tensor in rest:
            described = None if tensor is None else [tensor.tolist(), str(tensor.dtype), tensor.requires_grad]
            message.append(described)  # type: ignore[arg-type]
        found.append(tuple(message))
    transport.flush()
    transport.close()
    return found


def in_layouts() -> list[Tensor]:
    """The numbers 0 to 23 as 2 x 3 x 4 tensors with different memory layouts; the last one has gaps. And tensors whose
    memory differs from their values: a conjugate, and the negative imaginary part of one.
    """
    numbers = torch.arange(24.0)
    conjugate = torch.complex(numbers, -numbers).view(2, 3, 4).conj()
    return [
        numbers.view(2, 3, 4),
        numbers.view(4, 3, 2).permute(2, 1, 0).contiguous().permute(0, 1, 2),
        numbers.view(2, 3, 4).transpose(1, 2).contiguous().transpose(1, 2),
        numbers.view(2, 3, 4).permute(2, 0, 1).contiguous().permute(1, 2, 0),
        torch.stack([numbers, numbers]).view(2, 4, 3, 2).transpose(1, 3)[0].expand(2, 2, 3, 4)[0],
        conjugate,
        conjugate.imag.contiguous(),
        conjugate.imag,
    ]


def exchange_layouts(shared: bool) -> list[tuple[Tensor, tuple[int, ...]]]:
    """The received tensors of `in_layouts`, with their strides. In the second message all have the first layout."""
    transport, rank, _ = _ring(shared)
    if rank == 0:
        transport.send(Edge(0, 1), "kind", in_layouts())
        transport.send(Edge(0, 1), "kind", [tensor.contiguous() for tensor in in_layouts()])
        transport.flush()
        found = []
    else:
        receives = [transport.post(Edge(0, 1), "kind") for _ in range(2)]
        found = [(t, t.stride()) for receive in receives for t in receive.wait() if t is not None]
    transport.close()
    return found


def exchange_changed_shapes(shared: bool) -> str:
    """Returns the error message of the sender."""
    transport, rank, _ = _ring(shared)
    message = ""
    if rank == 0:
        transport.send(Edge(0, 1), "kind", (torch.zeros(2),))
        try:
            transport.send(Edge(0, 1), "kind", (torch.zeros(3),))
        except TransportError as error:
            message = str(error)
    else:
        transport.post(Edge(0, 1), "kind").wait()
    transport.close()
    return message


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

    for part in (
        "rank 0 -> rank 1 (stages): microbatches of the same input shapes must make tensors of the same shapes. ",
        "Agreed at the first one: [(2,) torch.float32]; now: [(3,) torch.float32]. The model's shapes or used outputs ",
        "make them depend on the input shapes only. If data decide which values have a gradient, pass a sample= for",
    ):
        assert part in sender


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
    edges = [f"rank {one} -> rank {other} (stages)" for one, other in ((0, 1), (1, 0), (1, 2), (2, 1))]
    some, all_of_them = "the sum over ranks [0, 2]", "the sum over ranks [2, 1, 0]"
    expected = [[*edges[:2], some, all_of_them], [*edges, all_of_them], [*edges[2:], some, all_of_them]]

    found = pool.run(3, list_communicators, ((0, 2), (2, 1, 0)))
    assert found == [([f"penstock {name}" for name in names], 0) for names in expected]


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


RECEIVED: dict[str, tuple[Callable[..., list[Any]], tuple[bool, ...], list[Any]]] = {
    "messages of all sizes come as they were sent": (exchange_sizes, (), [True] * 24),
    "a send never waits for its receiver": (pile_up, (), [number + 0.5 for number in range(50)]),
    "receives need not be waited for in order nor at all": (read_in_any_order, (), [3.0, 1.0, 19.0, 3.0]),
    "to wait for a message is not to wait for the next one": (wait_for_a_late_message, (False,), [0.0, 1.0, 2.0]),
    "also where the next one was asked for before": (wait_for_a_late_message, (True,), [0.0, 1.0, 2.0]),
    "what was posted still comes when the receiver closes": (close_before_it_comes, (), [5.0]),
}


@BOTH
@pytest.mark.parametrize("law", RECEIVED)
def test_the_second_of_two_ranks_receives(pool: Pool, shared: bool, law: str) -> None:
    job, arguments, expected = RECEIVED[law]

    assert pool.run(2, job, shared, *arguments)[1] == expected


@BOTH
def test_what_was_sent_is_delivered_after_the_sender_has_left(pool: Pool, shared: bool) -> None:
    _, (first, second, *error) = pool.run(2, leave_messages, shared)

    assert (first, second) == (1.0, 2.0)
    if shared:
        assert error[0].startswith("rank 0 closed its connection to this rank (rank 0 -> rank 1 (stages)).")
        assert error[0].endswith("The connection says: it was closed by the other end")


def test_nothing_is_left_behind(pool: Pool) -> None:
    before = sorted(os.listdir("/dev/shm"))
    pool.run(3, exchange, True)

    assert sorted(os.listdir("/dev/shm")) == before
    assert "@penstock-" not in Path("/proc/net/unix").read_text()
