"""The device of a process: the default one, CUDA's settings before its first use, and what its ranks compute with."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from penstock.runtime.devices.process_hooks import hooks_allowed
from penstock.runtime.devices.staging import Staging, staging_for
from penstock.runtime.devices.streams import Streams, streams_for
from penstock.runtime.devices.timestamps import Timer, timer_for

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The environment variable for the number of hardware queues through which CUDA feeds a GPU. Streams that share a queue
wait for each other, so that one that waits for a message blocks others.
"""
_MOST_CONNECTIONS, _USUAL_CONNECTIONS = 32, 8
"""The largest value that CUDA supports, and its default."""


def prepare_gpu() -> None:
    """Makes CUDA use as many queues as it can, unless the user has set their number. It is called before the GPU is
    first used; CUDA does not read the variable again after that.
    """
    if hooks_allowed() and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ.setdefault(CONNECTIONS, str(_MOST_CONNECTIONS))


def count_queues() -> int:
    """The number of queues through which CUDA feeds this process's GPU."""
    value = os.environ.get(CONNECTIONS, "")
    return int(value) if value.isdecimal() else _USUAL_CONNECTIONS


def local_device() -> torch.device:
    """Returns the GPU of this process and makes it PyTorch's current one; returns the CPU if there is no GPU.

    ``torchrun`` numbers the processes of a host (``LOCAL_RANK``). Each takes the GPU of its number, modulo the number
    of GPUs. Without ``torchrun`` it is PyTorch's current GPU.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    prepare_gpu()
    number = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """Holds what the ranks of one process compute with."""

    device: torch.device
    staging: Staging
    """Copies tensors to the host and back."""
    streams: Streams
    timer: Timer


def make_device_context(device: torch.device, ranks: Iterable[int], check: Callable[[], None]) -> DeviceContext:
    """Makes the context of `ranks`, which compute on `device`. `check` raises if their messages have been aborted."""
    return DeviceContext(device, staging_for(device, check), streams_for(device, ranks), timer_for(device))
