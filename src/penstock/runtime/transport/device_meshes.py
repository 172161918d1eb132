"""The processes of one stage as a `DeviceMesh`: replicas along ``dp``, the lanes of each replica along ``tp``.

Process p is lane ``p % t`` of the schedule's rank ``p // t``. Where all stages have equally many replicas, the mesh of
a stage is a slice of one mesh of all processes, (``pp``, ``dp``, ``tp``); the stages that a rank holds under
`interleaved` are at one place of ``pp``. Where the numbers of replicas differ there is no such block, and every stage
has a mesh of its own.
"""

from datetime import timedelta

import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock.scheduling.placements import Placement

__all__ = ["processes_of", "stage_mesh"]


def processes_of(rank: int, lanes: int) -> range:
    """The processes that are the schedule's rank `rank` together."""
    return range(rank * lanes, (rank + 1) * lanes)


def stage_mesh(placement: Placement, rank: int, lanes: int, device: torch.device, timeout_seconds: float) -> DeviceMesh:
    """The mesh (``dp``, ``tp``) of the stages on the schedule's rank `rank`, along which nobody waits longer than
    `timeout_seconds`. Collective over all processes.
    """
    mesh = _make_mesh(placement, rank, lanes, device)
    for group in mesh.get_all_groups():
        # A mesh takes no timeout of its own (torch 2.11 to 2.13), and that of the default group may be half an hour.
        group.set_timeout(timedelta(seconds=timeout_seconds))
    return mesh


def _make_mesh(placement: Placement, rank: int, lanes: int, device: torch.device) -> DeviceMesh:
    groups = list(dict.fromkeys(placement.stages))
    blocks = [[list(processes_of(replica, lanes)) for replica in group] for group in groups]
    if len({len(group) for group in groups}) == 1:
        return DeviceMesh(device.type, torch.tensor(blocks), mesh_dim_names=("pp", "dp", "tp"))["dp", "tp"]
    # A mesh makes process groups, which all processes do together and in one order.
    meshes = [DeviceMesh(device.type, torch.tensor(block), mesh_dim_names=("dp", "tp")) for block in blocks]
    (own,) = [mesh for mesh, group in zip(meshes, groups, strict=True) if rank in group]
    return own
