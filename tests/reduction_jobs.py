"""Jobs for the processes of the reductions' tests."""

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import TransportError
from penstock.runtime.transport import Transport
from penstock.runtime.worlds import join_world

__all__ = ["SIZES", "part_of", "sum_different_sizes", "sum_parts"]

SIZES = {"one": 1, "whole": 1_000, "cut": 10_000, "cut unevenly": 10_001}
"""Numbers of float64 by form; more than 64 KiB of them are cut among more than two ranks."""


def part_of(rank: int, form: str, number: int) -> Tensor:
    """What `rank` gives to a sum: numbers of very different sizes, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(1_000 * number + rank)
    magnitudes = 10.0 ** torch.randint(-8, 8, (SIZES[form],), dtype=torch.float64, generator=generator)
    return torch.randn(SIZES[form], dtype=torch.float64, generator=generator) * magnitudes


def _connect(group: tuple[int, ...]) -> tuple[Transport, int]:
    return join_world().connect((), torch.device("cpu"), 30.0, (group,)), dist.get_rank()


def sum_parts(group: tuple[int, ...]) -> list[Tensor]:
    """Three rounds of sums of every form, with all of a round under way at once; nothing on ranks not in `group`."""
    transport, rank = _connect(group)
    sums = []
    for number in range(3 if rank in group else 0):
        tickets = [transport.reduce(group, rank, form, part_of(rank, form, number)) for form in SIZES]
        for ticket in tickets:
            (total,) = ticket.wait()
            assert total is not None and ticket.ready()
            sums.append(total)
    transport.close()
    return sums


def sum_different_sizes() -> str:
    """The message of the error: this rank gives as many numbers as its own number and five."""
    group = tuple(range(dist.get_world_size()))
    transport, rank = _connect(group)
    ticket = transport.reduce(group, rank, "form", torch.zeros(5 + rank))
    try:
        ticket.wait()
    except TransportError as error:
        return str(error)
    finally:
        transport.close()
    return "summed"
