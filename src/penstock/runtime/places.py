"""Which device a process computes on, where nobody says so."""

import os

import torch

__all__ = ["local_device"]


def local_device() -> torch.device:
    """The GPU of this process, which becomes PyTorch's current one; the CPU if there is none.

    ``torchrun`` numbers the processes of a host (``LOCAL_RANK``) and gives each the GPU of its number, or one in turn
    if there are more processes than GPUs. Without ``torchrun`` it is PyTorch's current GPU.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
