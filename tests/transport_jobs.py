"""Jobs for the processes of the transport's tests."""

from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import TransportError
from penstock.runtime.transport import Edge, Transport
from penstock.runtime.worlds import join_world

__all__ = ["exchange", "exchange_changed_shapes"]


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
