"""The local shard of a tensor: this process's shard of a `DTensor`, or all of a plain tensor.

The runtime moves and stores local shards (slots of weights, sums over replicas), which are plain tensors. The model,
the optimizer and checkpoints work on the tensors themselves. The functions here convert between the two.

Laws of this file:
  1. `local_shard`, `set_local_shard` and `from_local_shard` neither copy nor communicate.
  2. `redistributed_like`, `whole` and `assign` may communicate, so all processes of the tensor's mesh call them
     together.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar, cast

import torch
from torch import Tensor

from penstock.torch_internals.distributed import local_tensor, replace_local_tensor
from penstock.torch_internals.unimported import is_dtensor

T = TypeVar("T")


def local_shard(tensor: Tensor) -> Tensor:
    """The memory of this process's shard, as a plain tensor without history."""
    return local_tensor(tensor).data if is_dtensor(tensor) else tensor.data


def by_size(tensors: Iterable[tuple[T, Tensor]], most: float, first: float | None = None) -> Iterator[list[T]]:
    """The names of `tensors` in groups whose shards take at most `most` bytes, the first one `first`; or in groups of
    one that is larger.
    """
    group, taken, limit = list[T](), 0, most if first is None else first
    for name, tensor in tensors:
        size = local_shard(tensor).nbytes
        if group and taken + size > limit:
            yield group
            group, taken, limit = [], 0, most
        group.append(name)
        taken += size
    yield group


def set_local_shard(parameter: Tensor, shard: Tensor) -> None:
    """Makes `shard` the memory of this process's shard of `parameter`, which keeps its identity."""
    if not is_dtensor(parameter):
        parameter.data = shard
    elif shard.dtype == parameter.dtype:
        # Setting .data of a DTensor changes the storage that it reports, but not the shard that it computes with.
        local_tensor(parameter).data = shard
    else:
        replace_local_tensor(parameter, from_local_shard(shard, parameter))


def from_local_shard(shard: Tensor, like: Tensor) -> Tensor:
    """The tensor laid out as `like` whose local shard is `shard`."""
    if not is_dtensor(like):
        return shard
    with torch.no_grad():
        return like.from_local(
            shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def redistributed_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """`gradient` laid out as `parameter`. Autograd may leave it as a sum over the mesh that is still to be taken."""
    if not is_dtensor(gradient) or not is_dtensor(parameter):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(parameter.device_mesh, parameter.placements)


def whole(tensor: T) -> T:
    """All of `tensor` as a plain tensor, with its history; anything but a `DTensor` is returned as it is."""
    return cast(T, tensor.full_tensor()) if is_dtensor(tensor) else tensor


def distributed_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, which every process has whole, laid out as `like`."""
    if not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    # Every process has the same values, so each takes its own shard, without a message.
    own = tensor.detach().to(like.device)
    return distribute_tensor(own, like.device_mesh, like.placements, src_data_rank=None)


def assign(target: Tensor, tensor: Tensor) -> None:
    """Copies `tensor`, which every process has whole, into `target`."""
    target.copy_(distributed_like(tensor, target))


def dimensions_of(tensor: Tensor) -> tuple[str, ...]:
    """The names of the mesh dimensions that a `DTensor` is laid out over ('?' for one without a name); () for another
    tensor.
    """
    if not is_dtensor(tensor):
        return ()
    mesh = tensor.device_mesh
    return mesh.mesh_dim_names or ("?",) * mesh.ndim
