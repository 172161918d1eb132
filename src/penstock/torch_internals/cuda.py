"""What CUDA libraries keep for PyTorch. Tried on torch 2.11 and 2.13."""

import torch

from penstock.torch_internals.availability import missing


def clear_cublas_workspaces() -> None:
    """Gives back the workspaces that cuBLAS keeps for each thread that has called it.

    ``torch.cuda.empty_cache()`` leaves them: the allocator takes them for memory in use.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:
        raise missing("torch._C._cuda_clearCublasWorkspaces", "to measure the memory of a layer on a GPU")
    clear()
