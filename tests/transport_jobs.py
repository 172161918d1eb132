"""Jobs for the processes of the transport's tests."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import TransportError
from penstock.runtime.transport import Edge, Transport
from penstock.runtime.worlds import join_world

__all__ = ["exchange", "exchange_changed_shapes", "exchange_layouts", "in_layouts"]


def _ring() -> tuple[Transport, int, int]:
    """A transport along the ring of ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    edges = [Edge(source, (source + 1) % ranks) for source in range(ranks)]
    return join_world().connect(edges, torch.device("cpu"), 30.0), rank, ranks


def exchange() -> list[Any]:
    """Each rank sends four messages of two forms to the next one, and tells what it got."""
    transport, rank, ranks = _ring()
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
        head, *rest = ticket.wait()
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
    """The numbers 0 to 23 as 2 x 3 x 4 tensors that lie in memory in different ways; the last one has gaps."""
    numbers = torch.arange(24.0)
    return [
        numbers.view(2, 3, 4),
        numbers.view(4, 3, 2).permute(2, 1, 0).contiguous().permute(0, 1, 2),
        numbers.view(2, 3, 4).transpose(1, 2).contiguous().transpose(1, 2),
        numbers.view(2, 3, 4).permute(2, 0, 1).contiguous().permute(1, 2, 0),
        torch.stack([numbers, numbers]).view(2, 4, 3, 2).transpose(1, 3)[0].expand(2, 2, 3, 4)[0],
    ]


def exchange_layouts() -> list[tuple[Tensor, tuple[int, ...]]]:
    """What came of `in_layouts`, with its strides; the second message is all of the first layout."""
    transport, rank, _ = _ring()
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


def exchange_changed_shapes() -> str:
    """The message of the error at the sender."""
    transport, rank, _ = _ring()
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
