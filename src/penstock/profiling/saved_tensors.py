"""The bytes that autograd keeps alive from a forward until its backward.

A formula per kind of layer would be wrong for the next kind of layer, so they are measured: autograd hands every
tensor that it saves to a hook, and what it has not let go of at the end of the forward is what it keeps.

What is counted: each distinct storage once, whole (a saved view keeps all of its base alive), however many operations
saved it. A layer's own inputs count when its backward needs them.
What is not: storages that outlive the backward anyway, which are parameters, buffers and other constants of the
module; and what an autograd function hides on its context instead of saving it with `save_for_backward`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Recording", "measure_saved_bytes", "recording"]


class _Kept:
    """What autograd holds in place of a saved tensor: it dies when autograd lets go of that tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Recording:
    """The tensors that autograd saved while this recording was on, as long as autograd keeps them."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: WeakSet[_Kept] = WeakSet()

    def pack(self, tensor: Tensor) -> _Kept:
        """Notes a tensor that autograd saves."""
        # Detached: a saved result would otherwise hold the node that saved it, and neither would ever be freed.
        kept = _Kept(tensor.detach())
        self._kept.add(kept)
        return kept

    def storages(self) -> dict[int, int]:
        """The bytes of every storage that autograd keeps now, by address."""
        storages = [kept.tensor.untyped_storage() for kept in self._kept]
        return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes() > 0}


@contextmanager
def recording() -> Iterator[Recording]:
    """Records what autograd saves in its body."""
    record = Recording()
    with saved_tensors_hooks(record.pack, _unpack):
        yield record


def measure_saved_bytes(forward: Callable[[], object], again: Callable[[], object]) -> int:
    """The bytes that autograd keeps after `forward`, in storages that live no longer than its backward.

    `again` is the same forward on copies of its inputs. What both of them keep, both being alive, is no work of either:
    it is a parameter, a buffer or a constant, under whatever name the module holds it.
    """
    with recording() as first:
        result = forward()
    with recording() as second:
        repeated = again()
    kept, constant = first.storages(), second.storages()
    # Both results must live until here: autograd keeps nothing for a result that is gone.
    del result, repeated
    return sum(size for address, size in kept.items() if address not in constant)


def _unpack(kept: _Kept) -> Tensor:
    return kept.tensor
