"""Private names of ``torch.distributed``: what each gives, and where it is gone. One process, a store in memory."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from penstock.runtime.devices.communicators import Members, connect_gloo
from penstock.torch_internals.distributed import (
    end_coalescing,
    gather_into,
    local_tensor,
    replace_local_tensor,
    start_coalescing,
)
from support.jobs.staging_jobs import members
from support.processes import Pool


class Public:
    """A backend of a PyTorch that has public names only."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def allgather(self, *arguments: Any) -> Any:
        return self._backend.allgather(*arguments)


def gather_both_ways() -> list[list[float]]:
    """What all ranks have, gathered by the private name and by the public one."""
    backend = connect_gloo(members(tuple(range(dist.get_world_size()))))
    own = torch.tensor([10.0 * dist.get_rank(), 10.0 * dist.get_rank() + 0.5])
    found = []
    for each in (backend, Public(backend)):
        every = torch.zeros(2 * dist.get_world_size())
        gather_into(each, every, own).wait()
        found.append(every.tolist())
    backend.shutdown()
    return found


class Counting:
    """A backend that says what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def _start_coalescing(self) -> None:
        self.asked.append("start")

    def _end_coalescing(self) -> str:
        self.asked.append("end")
        return "work"


def test_calls_between_start_and_end_are_one() -> None:
    backend = Counting()
    start_coalescing(backend)

    assert end_coalescing(backend) == "work"
    assert backend.asked == ["start", "end"]


def test_torchs_backends_have_both() -> None:
    """The names of the base class of all backends, which NCCL's fills in; Gloo's refuses."""
    backend = connect_gloo(Members("alone", (0,), 0, dist.HashStore(), 60.0))

    assert not backend.supports_coalescing
    for call in (start_coalescing, end_coalescing):
        with pytest.raises(RuntimeError, match="does not implement"):
            call(backend)


def test_all_ranks_gather_the_same_with_and_without(pool: Pool) -> None:
    assert pool.run(3, gather_both_ways) == [[[0.0, 0.5, 10.0, 10.5, 20.0, 20.5]] * 2] * 3


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_the_local_tensor_is_the_memory_that_is_computed_with(mesh: DeviceMesh) -> None:
    parameter = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)]))

    local_tensor(parameter).data = torch.full((2, 2), 3.0)  # type: ignore[arg-type]

    assert local_tensor(parameter) is local_tensor(parameter)  # type: ignore[arg-type]
    assert (parameter * 2).full_tensor().tolist() == [[6, 6], [6, 6]]  # type: ignore[attr-defined]
    assert parameter.to_local().data_ptr() == local_tensor(parameter).data_ptr()  # type: ignore[arg-type, attr-defined]


def test_a_dtensor_gets_memory_of_another_type(mesh: DeviceMesh) -> None:
    parameter = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)]))
    low = DTensor.from_local(torch.full((2, 2), 3.0, dtype=torch.bfloat16), mesh, [Shard(0)])
    parameter.grad_dtype = torch.float32
    replace_local_tensor(parameter, low)  # type: ignore[arg-type]
    product = parameter * low
    product.sum().backward()  # type: ignore[no-untyped-call]

    assert (parameter.dtype, product.dtype) == (torch.bfloat16, torch.bfloat16)
    assert product.full_tensor().tolist() == [[9, 9], [9, 9]]  # type: ignore[attr-defined]
    assert parameter.grad is not None and parameter.grad.dtype == torch.float32
    assert local_tensor(parameter).data_ptr() == local_tensor(low).data_ptr()  # type: ignore[arg-type]


def test_public_names_stand_for_the_private_ones_that_are_gone() -> None:
    """`ProcessGroup.set_timeout` and `get_group_store`, on which the transport relies, do what the private ones do."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    try:
        assert world is not None
        world.set_timeout(timedelta(seconds=7))
        assert world._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
        world.get_group_store().set("key", "value")
        assert dist.distributed_c10d._get_default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_success_has_the_name_that_distinguishes_it_from_nccls_errors() -> None:
    errors = torch._C._distributed_c10d.ErrorType

    assert (errors.SUCCESS.name, errors.TIMEOUT.name) == ("SUCCESS", "TIMEOUT")
