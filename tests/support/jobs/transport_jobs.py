"""Jobs for the processes of the transport's tests."""

import os
import threading
import time
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import TransportError
from penstock.runtime.transport.transport import Edge, Transport
from penstock.runtime.transport.worlds import join_world
from support.simulated.stream_races import RacingDevice, on_streams
from support.simulated.tardy_backend import LIVE
from support.transport_selection import sharing_memory

__all__ = [
    "close_before_it_comes",
    "connect_in_a_bound_world",
    "exchange",
    "exchange_changed_shapes",
    "exchange_layouts",
    "exchange_sizes",
    "in_layouts",
    "leave_messages",
    "pile_up",
    "read_in_any_order",
    "tell_communicators",
    "tell_threads",
    "wait_for_a_late_message",
]


def _ring(shared: bool = True) -> tuple[Transport, int, int]:
    """A transport along the ring of ranks, through shared memory or not."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    edges = [Edge(source, (source + 1) % ranks) for source in range(ranks)]
    with sharing_memory(shared):
        return join_world().connect(edges, torch.device("cpu"), 30.0), rank, ranks


def _refuse(*_: object) -> NoReturn:
    raise PermissionError("not on this machine")


def tell_communicators(groups: tuple[tuple[int, ...], ...]) -> tuple[list[str], int]:
    """The communicators that this rank makes between devices, in their order, and how many are left at the end. Edges
    both ways along a line of ranks, and sums over `groups`.
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
    """What happens to edges and sums of some of the ranks where the default group is bound to a device. Who makes a
    group of PyTorch's there without being in it splits the communicator of the default group, a call of all ranks.
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


def tell_threads(unwilling: int | None, refused: bool = False) -> list[str]:
    """The threads that the transport needs; the rank `unwilling` will share no memory, or is `refused` any."""
    before = set(threading.enumerate())
    made, out = os.memfd_create, dist.get_rank() == unwilling
    os.memfd_create = _refuse if out and refused else made  # type: ignore[assignment]
    try:
        transport, rank, ranks = _ring(not out or refused)
    finally:
        os.memfd_create = made
    transport.send(Edge(rank, (rank + 1) % ranks), "form", (torch.ones(1),))
    transport.post(Edge((rank - 1) % ranks, rank), "form").wait()
    names = sorted(thread.name for thread in set(threading.enumerate()) - before)
    transport.close()
    return names


def pile_up(shared: bool) -> list[float]:
    """Rank 0 sends fifty messages, of up to 200 kB, before rank 1 reads the first one."""
    transport, rank, _ = _ring(shared)
    edge, sizes = Edge(0, 1), [1000 * (number % 7) ** 2 for number in range(50)]
    found = []
    if rank == 0:
        for number, size in enumerate(sizes):
            transport.send(edge, ("form", size), (torch.full((size,), float(number)), torch.tensor(number + 0.5)))
        dist.barrier()
        transport.flush()
    else:
        dist.barrier()
        for number, size in enumerate(sizes):
            many, one = transport.post(edge, ("form", size)).wait()
            assert many is not None and one is not None
            assert torch.equal(many, torch.full((size,), float(number)))
            found.append(one.item())
    transport.close()
    return found


def read_in_any_order(shared: bool) -> list[float]:
    """Rank 1 posts twenty receives and waits for a few of them; rank 0 can hand over all the same."""
    transport, rank, _ = _ring(shared)
    edge, found = Edge(0, 1), []
    if rank == 0:
        for number in range(20):
            transport.send(edge, "form", (torch.full((20_000,), float(number)),))
        dist.barrier()
        transport.flush()
    else:
        tickets = [transport.post(edge, "form") for _ in range(20)]
        dist.barrier()
        for number in (3, 1, 19, 3):
            (tensor,) = tickets[number].wait()
            assert tensor is not None and tickets[number].ready()
            found.append(tensor[-1].item())
    dist.barrier()
    transport.close()
    return found


def wait_for_a_late_message(shared: bool, asks: bool) -> list[float]:
    """Rank 1 waits for messages that come late, while it has posted later ones, which rank 0 sends only when it has
    heard of the earlier ones. The later ones are of an unknown form or, if it `asks` before whether they have come, of
    the same one.
    """
    transport, rank, _ = _ring(shared)
    there, back, found = Edge(0, 1), Edge(1, 0), []
    later = "form" if asks else "another form"
    for number, form in enumerate(("form", "form", later)):
        if rank == 0:
            # Longer than anybody looks for it before a thread waits.
            time.sleep(0.05)
            transport.send(there, form, (torch.full((100,), float(number)),))
            transport.post(back, "heard").wait()
            continue
        if number < 2:
            ticket = transport.post(there, form)
        if number == 1:
            last = transport.post(there, later)
            assert not (asks and last.ready())
        (tensor,) = (last if number == 2 else ticket).wait()
        assert tensor is not None
        found.append(tensor[-1].item())
        transport.send(back, "heard", (torch.ones(1),))
    dist.barrier()
    transport.close()
    return found


def exchange_sizes(shared: bool) -> list[bool]:
    """Rank 0 sends messages from nothing to 4 MB, with a header of more than a page and the mark of a message that has
    not come; rank 1 gets three of each. Whether each is what was sent.
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
    """Rank 1 hangs up while rank 0 has not sent yet what rank 1 has posted a receive for."""
    transport, rank, _ = _ring(shared)
    found = []
    if rank == 0:
        time.sleep(0.3)
        transport.send(Edge(0, 1), "form", (torch.tensor(5.0),))
        transport.flush()
        transport.close()
    else:
        ticket = transport.post(Edge(0, 1), "form")
        transport.close()
        found = [tensor.item() for tensor in ticket.wait() if tensor is not None]
    return found


def leave_messages(shared: bool) -> list[Any]:
    """Rank 0 sends two messages and hangs up; rank 1 reads them, and waits for a third."""
    transport, rank, _ = _ring(shared)
    edge, found = Edge(0, 1), []
    if rank == 0:
        transport.send(edge, "form", (torch.tensor(1.0),))
        transport.send(edge, "form", (torch.tensor(2.0),))
        if shared:
            transport.close()
            dist.barrier()
        else:
            dist.barrier()
            transport.flush()
            transport.close()
        return found
    dist.barrier()
    tickets = [transport.post(edge, "form") for _ in range(3 if shared else 2)]
    found = [tensor.item() for ticket in tickets[:2] for tensor in ticket.wait() if tensor is not None]
    if shared:
        try:
            tickets[2].wait()
        except TransportError as error:
            found.append(str(error))
    transport.close()
    return found


def exchange(shared: bool) -> list[Any]:
    """Each rank sends four messages of two forms to the next one, and tells what it got."""
    transport, rank, ranks = _ring(shared)
    source, target = Edge((rank - 1) % ranks, rank), Edge(rank, (rank + 1) % ranks)
    forms = ("long", "long", "short", "long")
    tickets = [transport.post(source, form) for form in forms]
    for number, form in enumerate(forms):
        head = torch.tensor([rank, number])
        if form == "long":
            weight = torch.tensor(number + 0.5, requires_grad=True)
            transport.send(target, form, (head, None, weight))
        else:
            transport.send(target, form, (head.bfloat16(), torch.empty(0, dtype=torch.float64)))
    found = []
    for ticket in tickets:
        head, *rest = ticket.wait()  # type: ignore[assignment]
        assert head is not None
        message = [[*head.tolist(), str(head.dtype), head.requires_grad]]
        for part in rest:
            described = None if part is None else [part.tolist(), str(part.dtype), part.requires_grad]
            message.append(described)  # type: ignore[arg-type]
        found.append(tuple(message))
    transport.flush()
    transport.close()
    return found


def in_layouts() -> list[Tensor]:
    """The numbers 0 to 23 as 2 x 3 x 4 tensors that lie in memory in different ways; the last one has gaps. And what
    is not in memory as it is read: a conjugate, and the negative imaginary part of one.
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
    """What came of `in_layouts`, with its strides; the second message is all of the first layout."""
    transport, rank, _ = _ring(shared)
    if rank == 0:
        transport.send(Edge(0, 1), "form", in_layouts())
        transport.send(Edge(0, 1), "form", [tensor.contiguous() for tensor in in_layouts()])
        transport.flush()
        found = []
    else:
        tickets = [transport.post(Edge(0, 1), "form") for _ in range(2)]
        found = [(t, t.stride()) for ticket in tickets for t in ticket.wait() if t is not None]
    transport.close()
    return found


def exchange_changed_shapes(shared: bool) -> str:
    """The message of the error at the sender."""
    transport, rank, _ = _ring(shared)
    message = ""
    if rank == 0:
        transport.send(Edge(0, 1), "form", (torch.zeros(2),))
        try:
            transport.send(Edge(0, 1), "form", (torch.zeros(3),))
        except TransportError as error:
            message = str(error)
    else:
        transport.post(Edge(0, 1), "form").wait()
    transport.close()
    return message
