"""Which device a process computes on, where nobody says so, and what its GPU must know before it is first used."""

import os

import torch

from penstock.runtime.devices.process_hooks import hooks_allowed

__all__ = ["CONNECTIONS", "count_queues", "local_device", "prepare_gpu"]

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The environment variable that says by how many queues CUDA feeds a GPU. Streams that share a queue wait for each
other, so that one that waits for a message keeps others from going on."""
MOST_CONNECTIONS, USUAL_CONNECTIONS = 32, 8
"""What CUDA can do, and what it does if nobody says anything."""


def prepare_gpu() -> None:
    """Has CUDA use as many queues as it can, unless the user says how many. Called before the GPU is first used; after
    that CUDA reads the variable no more.
    """
    if hooks_allowed() and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ.setdefault(CONNECTIONS, str(MOST_CONNECTIONS))


def count_queues() -> int:
    """By how many queues CUDA feeds this process's GPU."""
    told = os.environ.get(CONNECTIONS, "")
    return int(told) if told.isdecimal() else USUAL_CONNECTIONS


def local_device() -> torch.device:
    """The GPU of this process, which becomes PyTorch's current one; the CPU if there is none.

    ``torchrun`` numbers the processes of a host (``LOCAL_RANK``) and gives each the GPU of its number, or one in turn
    if there are more processes than GPUs. Without ``torchrun`` it is PyTorch's current GPU.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    prepare_gpu()
    number = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
