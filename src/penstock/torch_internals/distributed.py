"""Backends of ``torch.distributed`` without a group around them, its hook, and the memory of a `DTensor`."""

import os
from datetime import timedelta
from functools import cache
from inspect import getclosurevars
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from penstock.torch_internals.availability import missing

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable by which Gloo takes an interface. It is Gloo's, and a user may set it."""

_COALESCING = "to send and receive in one operation"


def hook_below(hook: object) -> object:
    """The hook for uncaught errors around which PyTorch has put `hook`, or `hook` itself if it is not PyTorch's.

    Public: nothing. The hook that a process group leaves in ``sys.excepthook`` keeps the former one in its closure.
    Where that has another name, PyTorch's hook counts as the user's.
    """
    while getattr(hook, "__module__", "") == dist.distributed_c10d.__name__ and callable(hook):
        below = getclosurevars(hook).nonlocals.get("old_hook")
        if below is None:
            break
        hook = below
    return hook


def gloo_backend(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A backend of Gloo. All of a process share the thread that reads and writes their connections.

    Public: the backend without options, which starts such a thread of its own. Each wakes up a hundred times a second,
    whether something has come or not: with 49 of them a step of two computing processes took 12 % longer.
    """
    made: Any = dist.ProcessGroupGloo
    try:
        options = made._Options()
        options._devices = list(_gloo_devices(os.getpid(), os.environ.get(INTERFACE, "")))
        options._threads = 2 * len(options._devices)
        options._timeout = timeout
    except AttributeError:
        return made(store, rank, size, timeout)
    return made(store, rank, size, options)


@cache
def _gloo_devices(process: int, interfaces: str) -> tuple[Any, ...]:
    """One for each of the `interfaces`, or for the one that Gloo chooses. A child of `process` needs its own."""
    made = dist.ProcessGroupGloo
    return tuple(made.create_device(interface=name) for name in interfaces.split(",") if name) or (
        made.create_default_device(),
    )


def device_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of `group` for tensors of `device`.

    Public: `dist.get_backend` returns its name only.
    """
    try:
        return group._get_backend(device)
    except AttributeError as error:
        raise missing("torch.distributed.ProcessGroup._get_backend", "to end the collectives of a mesh") from error


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
    """Fills `every` with the `own` of all ranks of `backend` or group, one after the other; returns the work.

    Public: `dist.all_gather_into_tensor`, for groups only, and under another name since torch 2.13. Without the private
    name: ``backend.allgather``, which gathers in memory of its own and copies.
    """
    together = getattr(backend, "_allgather_base", None)
    if together is not None:
        return together(every, own)
    return backend.allgather([list(every.chunk(every.numel() // own.numel()))], [own])


def local_tensor(tensor: "DTensor") -> Tensor:
    """The plain tensor that holds the memory of this rank's shard of `tensor`: the object itself.

    Public: ``to_local()``, which returns another object over the same memory (for parameters since torch 2.13, with
    gradients always), so that the shard cannot be moved to other memory by it.
    """
    try:
        return tensor._local_tensor
    except AttributeError as error:
        raise missing("torch.distributed.tensor.DTensor._local_tensor", "to move the weights of a DTensor") from error


def replace_local_tensor(tensor: "DTensor", other: Tensor) -> None:
    """Gives `tensor`, which keeps its identity, the memory and the type of `other`, which is laid out alike.

    Public: ``tensor.data = other``, which sets the type that `tensor` reports, and not what it computes with.
    """
    made: Any = other
    try:
        tensor.data, tensor._local_tensor, tensor._spec = other, made._local_tensor, made._spec
    except AttributeError as error:
        raise missing("torch.distributed.tensor.DTensor._spec", "to lower the weights of a DTensor") from error
