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

SIZES = {"one": 1, "whole": 1_000, "cut": 10_000, "cut unevenly": 10_001}
"""The number of float64 elements by kind. Tensors of more than 64 KiB are cut if there are more than two ranks."""


def summand_of(rank: int, kind: str, number: int) -> Tensor:
    """What `rank` adds: numbers of very different sizes, so that the order of additions matters."""
    generator = torch.Generator().manual_seed(1_000 * number + rank)
    magnitudes = 10.0 ** torch.randint(-8, 8, (SIZES[kind],), dtype=torch.float64, generator=generator)
    return torch.randn(SIZES[kind], dtype=torch.float64, generator=generator) * magnitudes


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
    """Sums all rows over a communicator, in this order of the ranks."""
    group = {"gloo": connect_gloo, "tardy": tardy_backend.connect}[backend](members(order))
    add = OrderedSum(order, group, dist.get_rank())
    sums = [add(row_of(dist.get_rank(), dtype, count)) for dtype, count in ROWS]
    dist.barrier()
    return sums


@contextmanager
def _carried_by(backend: str) -> Iterator[None]:
    """Makes the CPU a device that sends by itself for the duration of a block, unless the backend is Gloo."""
    if backend == "gloo":
        yield
        return
    with sharing_memory(False), on_streams(RacingDevice(tardy=True)):
        yield


def replicate(backend: str, frozen: dict[int, str], bucket_bytes: int) -> tuple[str, list[float]]:
    """Sums gradients while some replicas do not train all parameters. Returns the error, if there is one, and one of
    the sums.

    `frozen`: by rank, the name of a parameter that it does not train.
    """
    group, rank = tuple(range(dist.get_world_size())), dist.get_rank()
    parameters = {name: nn.Parameter(torch.zeros(4 + index)) for index, name in enumerate("abc")}
    parameters.pop(frozen.get(rank, ""), None)
    with _carried_by(backend):
        transport, _ = _connect(group)
        try:
            reducer = Reducer(transport, group, rank, 0, parameters, bucket_bytes=bucket_bytes)
            before = tardy_backend.messages()
            reducer.arm(1)
            (torch.stack([parameter.sum() for parameter in parameters.values()]).sum() * rank).backward()
            # From device to device, no sum starts within the first backwards.
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


def sum_all_kinds(group: tuple[int, ...]) -> list[Tensor]:
    """Three rounds of sums of every kind, with all sums of a round in flight at once. Returns nothing on ranks outside
    `group`.
    """
    transport, rank = _connect(group)
    sums = []
    for number in range(3 if rank in group else 0):
        receives = [transport.reduce(group, rank, kind, summand_of(rank, kind, number)) for kind in SIZES]
        for receive in receives:
            (total,) = receive.wait()
            assert total is not None and receive.ready()
            sums.append(total)
    transport.close()
    return sums


def sum_different_sizes() -> str:
    """The error message, if each rank adds a different number of elements."""
    group = tuple(range(dist.get_world_size()))
    transport, rank = _connect(group)
    receive = transport.reduce(group, rank, "kind", torch.zeros(5 + rank))
    try:
        receive.wait()
    except TransportError as error:
        return str(error)
    finally:
        transport.close()
    return "summed"
