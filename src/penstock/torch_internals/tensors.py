"""Tensors: how often one was written, which memory it has and what else has it, what CUDA libraries keep of it, and
arithmetic on many of them in one call."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.torch_internals.availability import missing

_VERSION = attrgetter("_version")


def times_written(tensor: Tensor) -> int:
    """How often `tensor`, or a view of its memory, has been written in place.

    Autograd counts it for its own checks. No public name has it: `torch.autograd.graph.increment_version` only writes.
    """
    return times_each_written((tensor,))[0]


def times_each_written(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """`times_written` of each of `tensors`."""
    try:
        return tuple(map(_VERSION, tensors))
    except AttributeError as error:
        raise missing("torch.Tensor._version", "to see what is written in place") from error


def set_times_written(tensors: Sequence[Tensor], times: Sequence[int]) -> None:
    """Sets what `times_written` returns for each of `tensors`. No public name does."""
    try:
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(times))
    except AttributeError as error:
        raise missing("torch._C._autograd._unsafe_set_version_counter", "to keep versions of weights") from error


def gradient_hooks(tensor: Tensor) -> tuple[Callable[[Tensor], Any], ...]:
    """The hooks that `Tensor.register_hook` put on `tensor`. No public name lists them."""
    try:
        hooks = tensor._backward_hooks
    except AttributeError as error:
        raise missing("torch.Tensor._backward_hooks", "to run the hooks of parameters") from error
    return tuple(hooks.values()) if hooks else ()


def accumulated_hooks(tensor: Tensor) -> tuple[Callable[[Tensor], Any], ...]:
    """The hooks of ``register_post_accumulate_grad_hook``. No public name lists them."""
    hooks = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return tuple(hooks.values()) if hooks else ()


def share_hooks(tensor: Tensor, other: Tensor) -> None:
    """Has the hooks of `tensor`, a leaf of autograd, run for `other`, too; who removes one removes it of both."""
    for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(tensor, table, None):
            # PyTorch itself does so where it makes a parameter of a file.
            setattr(other, table, hooks)


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that no other living storage has: that of its C++ object.

    ``data_ptr()`` is 0 for every empty tensor, and for every one on the meta device or of a trace. Without the private
    name: that of a weak reference, which has the same number and costs an object.
    """
    try:
        return int(storage._cdata)
    except AttributeError:
        return int(StorageWeakRef(storage).cdata)  # type: ignore[no-untyped-call]


def storage_references(storage: torch.UntypedStorage) -> int:
    """How many tensors have `storage`, those that only C++ holds as well. No public name counts them."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        raise missing("torch._C._storage_Use_Count", "to see what else holds an activation that is to be offloaded")
    # The Python object `storage` is one of those that it counts.
    return int(count(storage_key(storage))) - 1


# PyTorch's optimizers and `clip_grad_norm_` call the for-each functions, too. On a GPU, to launch a small operation
# takes longer than the operation. Without these functions: a loop, which has the same bits on a CPU.


def norm_of_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each of `tensors`, which are alike in device, type and layout.

    Public: `torch.nn.utils.get_total_norm`, which has one norm for all.
    """
    together = getattr(torch, "_foreach_norm", None)
    return [torch.linalg.vector_norm(each) for each in tensors] if together is None else list(together(tensors))


def multiply_each(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiplies `tensors`, which are alike, in place by `factor`. Public: a call for each."""
    together = getattr(torch, "_foreach_mul_", None)
    if together is not None:
        together(tensors, factor)
        return
    for each in tensors:
        each.mul_(factor)


def divide_each(tensors: Sequence[Tensor], number: float) -> None:
    """Divides `tensors`, which are alike, in place by `number`. Public: a call for each."""
    together = getattr(torch, "_foreach_div_", None)
    if together is not None:
        together(tensors, number)
        return
    for each in tensors:
        each.div_(number)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each of `sources` into its target. Public: a call for each."""
    together = getattr(torch, "_foreach_copy_", None)
    if together is not None:
        together(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def clear_cublas_workspaces() -> None:
    """Gives back the workspaces that cuBLAS keeps for each thread that has called it.

    ``torch.cuda.empty_cache()`` leaves them: the allocator takes them for memory in use.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:
        raise missing("torch._C._cuda_clearCublasWorkspaces", "to measure the memory of a layer on a GPU")
    clear()
