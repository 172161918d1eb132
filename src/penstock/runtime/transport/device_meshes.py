"""The processes of one stage as a `DeviceMesh`: replicas along ``dp``, tensor-parallel ranks along ``tp``.

With a tensor-parallel size of t, process p is tensor-parallel rank ``p % t`` of the schedule's rank ``p // t``. If all
stages have equally many replicas, the mesh of a stage is a slice of one mesh of all processes, (``pp``, ``dp``,
``tp``). The stages that a rank holds under `interleaved` then have one index along ``pp``. If the numbers of replicas
differ, there is no such block, and every stage has a mesh of its own.
"""

from datetime import timedelta

import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock.scheduling.placements import Placement


def processes_of(rank: int, tensor_parallel_size: int) -> range:
    """The processes that form the schedule's rank `rank`."""
    return range(rank * tensor_parallel_size, (rank + 1) * tensor_parallel_size)


def stage_mesh(
    placement: Placement, rank: int, tensor_parallel_size: int, device: torch.device, timeout_seconds: float
) -> DeviceMesh:
    """Makes the mesh (``dp``, ``tp``) of the stages on the schedule's rank `rank`, with `timeout_seconds` for its
    collectives. Collective over all processes.
    """
    mesh = _make_mesh(placement, rank, tensor_parallel_size, device)
    for group in mesh.get_all_groups():
        # A mesh has no timeout parameter (torch 2.11 to 2.13), and the default group's timeout may be half an hour.
        group.set_timeout(timedelta(seconds=timeout_seconds))
    return mesh


def _make_mesh(placement: Placement, rank: int, tensor_parallel_size: int, device: torch.device) -> DeviceMesh:
    groups = list(dict.fromkeys(placement.stages))
    blocks = [[list(processes_of(replica, tensor_parallel_size)) for replica in group] for group in groups]
    if len({len(group) for group in groups}) == 1:
        return DeviceMesh(device.type, torch.tensor(blocks), mesh_dim_names=("pp", "dp", "tp"))["dp", "tp"]
    # Making a mesh makes process groups, which all processes must do together and in one order.
    meshes = [DeviceMesh(device.type, torch.tensor(block), mesh_dim_names=("dp", "tp")) for block in blocks]
    (own,) = [mesh for mesh, group in zip(meshes, groups, strict=True) if rank in group]
    return own
