"""The bytes that a layer needs: those that autograd keeps until its backward, and those that it needs temporarily.

Kept bytes are measured, since a formula for each kind of layer would be wrong for the next kind: autograd passes every
tensor that it saves to a hook, and keeps those that it has not released at the end of the forward. Each distinct
storage counts once and whole (a saved view keeps all of its base alive). A layer's own inputs count if its backward
needs them. Not counted are storages that outlive the backward anyway (parameters, buffers and other constants of the
module), and tensors that an autograd function stores on its context without `save_for_backward`.

Temporary bytes are for its kernels, and for gradients on their way. On a CPU each operation that PyTorch runs, of a
forward or of autograd, passes a dispatch mode, which records the storages that it makes and drops those that have been
freed. Memory that a kernel allocates and frees within one operation is not seen.

The allocator of a CUDA device counts this memory, too (workspaces of products, sums of attention). Its blocks are
multiples of 512 bytes. cuBLAS allocates a workspace for each thread that calls it and keeps it. It belongs to no layer,
so layers must have run once before they are measured.

Laws of this file:
  1. A meter runs the work once.
  2. A meter does not depend on layers.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.profiling.spread_layers import local_storage
from penstock.torch_internals import pytrees as pytree
from penstock.torch_internals.dispatch import TorchDispatchMode
from penstock.torch_internals.tensors import clear_cublas_workspaces, storage_key


class _Kept:
    """Takes the place of a saved tensor in autograd, and dies when autograd releases that tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Recording:
    """Holds the tensors that autograd saved while this recording was on, as long as autograd keeps them."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: WeakSet[_Kept] = WeakSet()

    def pack(self, tensor: Tensor) -> _Kept:
        """Records a tensor that autograd saves."""
        # Detached: a saved result would otherwise hold the node that saved it, and neither would ever be freed.
        kept = _Kept(tensor.detach())
        self._kept.add(kept)
        return kept

    def storages(self) -> dict[int, int]:
        """The bytes of every storage that autograd keeps now, by address."""
        storages = [local_storage(kept.tensor) for kept in self._kept]
        return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes() > 0}


@contextmanager
def recording() -> Iterator[Recording]:
    """Records what autograd saves inside a ``with`` block."""
    record = Recording()
    with saved_tensors_hooks(record.pack, attrgetter("tensor")):
        yield record


def measure_saved_bytes(forward: Callable[[], object], again: Callable[[], object]) -> int:
    """The bytes that autograd keeps after `forward`, in storages that live no longer than its backward.

    `again` is the same forward on copies of its inputs. A storage that both keep while both are alive is a parameter, a
    buffer or a constant of the module, and is not counted.
    """
    with recording() as first:
        result = forward()
    with recording() as second:
        repeated = again()
    kept, constant = first.storages(), second.storages()
    # Both results must live until here: autograd keeps nothing for a result that is gone.
    del result, repeated
    return sum(size for address, size in kept.items() if address not in constant)


class Meter(Protocol):
    """Measures how many bytes are in use."""

    def held(self) -> int:
        """The bytes in use now."""

    def most(self, work: Callable[[], object]) -> int:
        """Runs `work` and returns the most bytes that were held meanwhile, what was held before included."""

    def fragmentation(self) -> float:
        """Bytes that the allocator has reserved for each byte of the most that `most` has found; 1 if unknown."""


class DispatchMeter:
    """Counts the storages that operations have made in `most` and that are still alive."""

    __slots__ = ("_mode",)

    def __init__(self) -> None:
        self._mode = _Storages()

    def held(self) -> int:
        """Bytes of storages that are alive."""
        return self._mode.forget_dead()

    def most(self, work: Callable[[], object]) -> int:
        """The most bytes after any operation."""
        self._mode.peak = self._mode.forget_dead()
        with self._mode:
            work()
        return self._mode.peak

    def fragmentation(self) -> float:
        """1: there is no allocator to ask."""
        return 1.0


class CudaMeter:
    """Asks the allocator of `device`, which counts when calls are made, so that no synchronization is needed.

    It starts with empty caches, without garbage, and without the workspaces that cuBLAS has kept from earlier work.
    """

    __slots__ = ("_peak", "device")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peak = 0
        gc.collect()
        torch.cuda.synchronize(device)
        clear_cublas_workspaces()
        torch.cuda.empty_cache()

    def held(self) -> int:
        """Bytes in use."""
        return torch.cuda.memory_allocated(self.device)

    def most(self, work: Callable[[], object]) -> int:
        """The allocator's own peak."""
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        found = torch.cuda.max_memory_allocated(self.device)
        self._peak = max(self._peak, found)
        return found

    def fragmentation(self) -> float:
        """The reserved bytes, with caches that were empty at first, over the peak."""
        return max(1.0, torch.cuda.memory_reserved(self.device) / max(1, self._peak))


def meter_of(device: torch.device) -> Meter:
    """The meter that is right for `device`."""
    return CudaMeter(device) if device.type == "cuda" else DispatchMeter()


class _Storages(TorchDispatchMode):
    """The storages that were made under this mode and are still alive."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        """By address of the storage's object."""
        self.peak = 0

    def forget_dead(self) -> int:
        """Drops storages that were freed; the bytes of the others."""
        self.alive = {
            key: entry
            for key, entry in self.alive.items()
            if not entry[0].expired()  # type: ignore[no-untyped-call]
        }
        return sum(size for _, size in self.alive.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.forget_dead()
        given = {storage_key(storage) for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            key = storage_key(storage)
            if key not in given and key not in self.alive:
                self.alive[key] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, self.forget_dead())
        return result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [local_storage(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
