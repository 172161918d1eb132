"""Jobs for the processes of the reductions' tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import TransportError
from penstock.runtime.devices.communicators import connect_gloo
from penstock.runtime.parameters.gradient_buckets import Reducer
from penstock.runtime.transport.ordered_all_reduce import OrderedSum
from penstock.runtime.transport.transport import Transport
from penstock.runtime.transport.worlds import join_world
from support.jobs.staging_jobs import members
from support.simulated import tardy_backend
from support.simulated.stream_races import RacingDevice, on_streams
from support.transport_selection import sharing_memory

__all__ = ["ROWS", "SIZES", "add_rows", "part_of", "replicate", "row_of", "sum_different_sizes", "sum_parts"]

SIZES = {"one": 1, "whole": 1_000, "cut": 10_000, "cut unevenly": 10_001}
"""Numbers of float64 by form; more than 64 KiB of them are cut among more than two ranks."""


def part_of(rank: int, form: str, number: int) -> Tensor:
    """What `rank` gives to a sum: numbers of very different sizes, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(1_000 * number + rank)
    magnitudes = 10.0 ** torch.randint(-8, 8, (SIZES[form],), dtype=torch.float64, generator=generator)
    return torch.randn(SIZES[form], dtype=torch.float64, generator=generator) * magnitudes


ROWS = [
    (dtype, count)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64)
    for count in (1, 7, 1_000, 40_000, 40_001)
]


def row_of(rank: int, dtype: torch.dtype, count: int) -> Tensor:
    """What `rank` adds."""
    generator = torch.Generator().manual_seed(rank)
    magnitudes = 10.0 ** torch.randint(-4, 5, (count,), generator=generator)
    return torch.randn(count, dtype=torch.float64, generator=generator).mul(magnitudes).to(dtype)


def add_rows(order: tuple[int, ...], backend: str) -> list[Tensor]:
    """The sums of all rows, in this order of the ranks, by a communicator."""
    group = {"gloo": connect_gloo, "tardy": tardy_backend.connect}[backend](members(order))
    add = OrderedSum(order, group, dist.get_rank())
    sums = [add(row_of(dist.get_rank(), dtype, count)) for dtype, count in ROWS]
    dist.barrier()
    return sums


@contextmanager
def _carried_by(backend: str) -> Iterator[None]:
    """In its body the CPU is a device that sends by itself, or a CPU if the backend is Gloo."""
    if backend == "gloo":
        yield
        return
    with sharing_memory(False), on_streams(RacingDevice(tardy=True)):
        yield


def replicate(backend: str, frozen: dict[int, str], bucket_bytes: int) -> tuple[str, list[float]]:
    """What goes wrong where a replica does not train all parameters, if something does; else the sum of one of them.

    `frozen`: by rank, the name of one that it does not train.
    """
    group, rank = tuple(range(dist.get_world_size())), dist.get_rank()
    parameters = {name: nn.Parameter(torch.zeros(4 + index)) for index, name in enumerate("abc")}
    parameters.pop(frozen.get(rank, ""), None)
    with _carried_by(backend):
        transport, _ = _connect(group)
        try:
            reducer = Reducer(transport, group, rank, 0, parameters, bucket_bytes=bucket_bytes)
            before = tardy_backend.messages()
            reducer.arm(1, parameters)
            (torch.stack([parameter.sum() for parameter in parameters.values()]).sum() * rank).backward()
            # From device to device none begins within the first backwards.
            assert tardy_backend.messages() == before
            assert all((parameter.grad is None) == (backend == "gloo") for parameter in parameters.values())
            reducer.start(1, {name: p.grad for name, p in parameters.items() if p.grad is not None})
            return "", reducer.finish(1)["a"].tolist()
        except TransportError as error:
            return str(error), []
        finally:
            transport.close()


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
