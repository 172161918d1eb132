"""This process's part of a tensor: all of a plain tensor, one shard of a `DTensor`.

What is moved or stored by the runtime (slots of weights, sums over replicas) is always the part, a plain tensor; what
the model, the optimizer and a checkpoint see is the tensor itself. Here is the way from one to the other.

Laws of this file:
  1. `part_of`, `point` and `of_part` only look at memory, or lay it out differently; they neither copy nor communicate.
  2. `settled`, `whole` and `assign` may communicate, so all processes of the tensor's mesh call them together.
"""

from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from penstock.torch_internals.distributed import local_tensor

__all__ = ["assign", "dimensions_of", "distributed_like", "of_part", "part_of", "point", "settled", "whole"]

T = TypeVar("T")


def part_of(tensor: Tensor) -> Tensor:
    """The memory of this process's part, as a plain tensor without history."""
    return local_tensor(tensor).data if isinstance(tensor, DTensor) else tensor.data


def point(parameter: nn.Parameter, part: Tensor) -> None:
    """Makes `part` the memory of this process's part of `parameter`, which keeps its identity."""
    if isinstance(parameter, DTensor):
        # Setting .data of a DTensor changes what torch believes of its storage, but not the part that it computes with.
        local_tensor(parameter).data = part
    else:
        parameter.data = part


def of_part(part: Tensor, like: Tensor) -> Tensor:
    """The tensor laid out as `like` of which `part` is this process's part."""
    if not isinstance(like, DTensor):
        return part
    with torch.no_grad():
        return DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def settled(gradient: Tensor, parameter: Tensor) -> Tensor:
    """`gradient` laid out as `parameter`: autograd may leave a sum over the mesh to be taken later."""
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(parameter.device_mesh, parameter.placements)


def whole(tensor: T) -> T:
    """All of `tensor`, as a plain tensor, with its history; what is not a `DTensor` as it is."""
    return cast(T, tensor.full_tensor()) if isinstance(tensor, DTensor) else tensor


def distributed_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, of which every process has all, laid out as `like`."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    # No rank's is the one truth: each takes its own part, without a message.
    own = tensor.detach().to(like.device)
    return distribute_tensor(own, like.device_mesh, like.placements, src_data_rank=None)


def assign(target: Tensor, tensor: Tensor) -> None:
    """Copies `tensor`, of which every process has all, into `target`."""
    target.copy_(distributed_like(tensor, target))


def dimensions_of(tensor: Tensor) -> tuple[str, ...]:
    """The names of the mesh dimensions that a `DTensor` is laid out over ('?' for one without a name); () for another
    tensor.
    """
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return mesh.mesh_dim_names or ("?",) * mesh.ndim
