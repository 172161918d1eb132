"""Jobs in which backends of ``torch.distributed`` are called without a group around them."""

from typing import Any

import torch
import torch.distributed as dist

from penstock.runtime.devices.communicators import connect_gloo
from penstock.torch_internals.distributed import gather_into
from support.jobs.staging_jobs import members

__all__ = ["gather_both_ways"]


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
