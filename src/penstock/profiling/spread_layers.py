"""Layers that several devices share: their parameters are `DTensor`s, and their forwards and backwards communicate.

All processes of the group measure the model together, with as many calls of every layer. Seconds include the
communication; bytes are those of this process.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.capturing.module_state import tensors_in
from penstock.errors import ProfileError
from penstock.torch_internals.distributed import local_tensor
from penstock.torch_internals.subclasses import plain_tensors
from penstock.torch_internals.tensors import storage_key
from penstock.torch_internals.unimported import is_dtensor


def sharing_group(modules: Sequence[nn.Module]) -> dist.ProcessGroup | None:
    """The processes that share the parameters of `modules`; None if every parameter is a plain tensor.

    Raises `ProfileError` if there are several groups, as where replicas have shards of their own.
    """
    shared = [each for module in modules for each in module.parameters() if is_dtensor(each)]
    groups = {group.group_name: group for each in shared for group in each.device_mesh.get_all_groups()}
    groups = {name: group for name, group in groups.items() if group.size() > 1}
    if len(groups) > 1:
        raise ProfileError(
            f"the parameters are laid out over {len(groups)} dimensions of a mesh: expected one, of tensor-parallel "
            "processes. Measure without replicas and without fully_shard"
        )
    return next(iter(groups.values()), None)


def longest(seconds: float, group: dist.ProcessGroup | None) -> float:
    """The most of the `seconds` of all processes of `group`. Collective."""
    if group is None:
        return seconds
    device = torch.accelerator.current_accelerator() if dist.get_backend(group) == "nccl" else None
    found = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return float(found)


def local_bytes(tensor: Tensor) -> int:
    """The bytes of `tensor` that this process holds."""
    own = _own(tensor)
    return own.numel() * own.element_size()


def held_bytes(module: nn.Module) -> tuple[int, int]:
    """The bytes of the parameters of `module` that are trained, and of all else that it holds in this process."""
    trained, held = set[int](), dict[tuple[int, int], int]()
    for parameter in module.parameters():
        if parameter.requires_grad:
            trained.update(storage_key(local_storage(plain)) for plain in plain_tensors(parameter))
    for _, tensor in tensors_in(module):
        storage = local_storage(tensor)
        key, place = storage_key(storage), int(_own(tensor).storage_offset())
        held[key, place] = max(held.get((key, place), 0), min(local_bytes(tensor), storage.nbytes()))
    own = sum(size for (key, _), size in held.items() if key in trained)
    return own, sum(held.values()) - own


def local_storage(tensor: Tensor) -> torch.UntypedStorage:
    """The storage of what this process holds of `tensor`."""
    return _own(tensor).untyped_storage()


def _own(tensor: Tensor) -> Tensor:
    return local_tensor(tensor) if is_dtensor(tensor) else tensor
