"""Where a private name of PyTorch's is gone and nothing stands in, the error names it and what to install."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from penstock.errors import PenstockError
from penstock.torch_internals import autograd, dispatch, distributed, export, modules, tensors

ADD = torch.ops.aten.add.Tensor
LINEAR, NORM = nn.Linear(1, 1), nn.BatchNorm1d(1)
HOOKS = r"torch\.nn\.Module\._forward_hooks"


Names: TypeAlias = tuple[tuple[object, str], ...]


class Bare:
    """A node, or a backend, of a PyTorch that has no such name."""


def relu_of_a_leaf() -> Tensor:
    return torch.zeros(2, requires_grad=True).relu()


GONE: list[tuple[Names, Callable[[], object], str]] = [
    (((torch._C, "_functions"),), lambda: autograd.node_kinds("AddmmBackward0"), r"torch\._C\._functions"),
    ((), lambda: autograd.saved_value(relu_of_a_leaf().grad_fn, "mat1"), r"ReluBackward0\._saved_mat1"),
    ((), lambda: autograd.gradient_shape(Bare(), 0), r"Bare\._input_metadata"),
    ((), lambda: autograd.sequence_number(Bare()), r"Bare\._sequence_nr"),
    (((ADD, "_schema"),), lambda: dispatch.schema_of(ADD), r"torch\._ops\.OpOverload\._schema"),
    (
        ((torch._C, "_cuda_clearCublasWorkspaces"),),
        tensors.clear_cublas_workspaces,
        r"torch\._C\._cuda_clearCublasWorkspaces",
    ),
    ((), lambda: distributed.start_coalescing(Bare()), r"torch\.distributed\.Backend\._start_coalescing"),
    ((), lambda: distributed.end_coalescing(Bare()), r"torch\.distributed\.Backend\._end_coalescing"),
    ((), lambda: export.shape_guards(object()), r".*_guards_code"),  # type: ignore[arg-type]
    *(
        (((LINEAR, table),), lambda: modules.is_hooked(LINEAR), HOOKS)
        for table in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    ),
    (
        ((nn.Module, "_compiled_call_impl"),),
        lambda: modules.is_compiled(LINEAR),
        r"torch\.nn\.Module\._compiled_call_impl",
    ),
    (((NORM, "_buffers"),), lambda: modules.registered_buffers(NORM), r"torch\.nn\.Module\._buffers"),
    (((NORM, "_parameters"),), lambda: modules.tensor_tables(NORM), r"torch\.nn\.Module\._parameters"),
    (
        ((torch._C._autograd, "_unsafe_set_version_counter"),),
        lambda: tensors.set_times_written([torch.zeros(1)], [0]),
        r"torch\._C\._autograd\._unsafe_set_version_counter",
    ),
    (
        ((torch._C, "_storage_Use_Count"),),
        lambda: tensors.storage_references(torch.zeros(4).untyped_storage()),
        r"torch\._C\._storage_Use_Count, .* to see what else holds an activation",
    ),
]


@pytest.mark.parametrize(("names", "call", "named"), GONE)
def test_a_name_that_is_gone_is_an_error(
    names: Names, call: Callable[[], object], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in names:
        monkeypatch.delattr(owner, name, raising=False)

    with pytest.raises(PenstockError, match=rf"has no {named}.*: expected torch 2\.13, .*Install it"):
        call()


@pytest.fixture
def dtensor() -> Iterator[DTensor]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DTensor.from_local(torch.ones(2, 2), DeviceMesh("cpu", [0]), [Shard(0)])
    dist.destroy_process_group()


def test_a_dtensor_without_a_local_tensor_is_an_error(dtensor: DTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dtensor, "_local_tensor")

    with pytest.raises(PenstockError, match=r"has no torch\.distributed\.tensor\.DTensor\._local_tensor"):
        distributed.local_tensor(dtensor)
