"""Backends of ``torch.distributed`` without a group around them, and the memory of a `DTensor`.

Tried on torch 2.11 and 2.13; NCCL's backend on a GPU, where there was one.
"""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.torch_internals.availability import missing

__all__ = ["end_coalescing", "gather_into", "local_tensor", "start_coalescing"]

_COALESCING = "to send and receive in one operation"


def start_coalescing(backend: Any) -> None:
    """The calls of `backend` that follow are one operation, until `end_coalescing`.

    Public: `dist.batch_isend_irecv`, for groups only; `dist.new_group` is a call of all ranks.
    """
    try:
        start = backend._start_coalescing
    except AttributeError as error:
        raise missing("torch.distributed.Backend._start_coalescing", _COALESCING) from error
    start()


def end_coalescing(backend: Any) -> Any:
    """The work of all calls since `start_coalescing`."""
    try:
        end = backend._end_coalescing
    except AttributeError as error:
        raise missing("torch.distributed.Backend._end_coalescing", _COALESCING) from error
    return end()


def gather_into(backend: Any, every: Tensor, own: Tensor) -> Any:
    """Fills `every` with the `own` of all ranks of `backend`, one after the other; returns the work.

    Public: `dist.all_gather_into_tensor`, for groups only. Without the private name: ``backend.allgather``, which
    gathers in memory of its own and copies.
    """
    together = getattr(backend, "_allgather_base", None)
    if together is not None:
        return together(every, own)
    return backend.allgather([list(every.chunk(every.numel() // own.numel()))], [own])


def local_tensor(tensor: DTensor) -> Tensor:
    """The plain tensor that holds the memory of this rank's shard of `tensor`: the object itself.

    Public: ``to_local()``, which returns another object over the same memory (for parameters since torch 2.13, with
    gradients always), so that the shard cannot be moved to other memory by it.
    """
    try:
        return tensor._local_tensor
    except AttributeError as error:
        raise missing("torch.distributed.tensor.DTensor._local_tensor", "to move the weights of a DTensor") from error
