"""The bytes that a layer needs for a moment: temporaries of its kernels, and gradients on their way.

Each operation that PyTorch runs, of a forward or of autograd, passes a dispatch mode, which notes the storages it makes
and drops those that have died meanwhile. That works alike on every device, and needs no allocator's counters. What a
kernel takes and gives back within one operation goes unseen.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["WorkspaceMeter"]


class WorkspaceMeter:
    """Measures a forward and its backward, one after the other."""

    __slots__ = ("_mode",)

    def __init__(self) -> None:
        self._mode = _Storages()

    def forward(self, work: Callable[[], object]) -> float:
        """Runs `work` and returns the most bytes that it held beyond what it leaves behind."""
        self._run(work)
        return float(self._mode.peak - self._mode.forget_dead())

    def backward(self, work: Callable[[], object]) -> float:
        """Runs `work` and returns the most bytes that it held beyond what the forward had left; 0 if it only frees."""
        before = self._mode.forget_dead()
        self._run(work)
        return float(self._mode.peak - before)

    def _run(self, work: Callable[[], object]) -> None:
        self._mode.peak = self._mode.forget_dead()
        with self._mode:
            work()


class _Storages(TorchDispatchMode):
    """The storages that were made under this mode and are still alive."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        """By address of the storage's object."""
        self.peak = 0

    def forget_dead(self) -> int:
        """The bytes that are alive."""
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
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self.alive:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, self.forget_dead())
        return result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
