"""The bytes that autograd keeps alive from a forward until its backward.

They are measured, since a formula for each kind of layer would be wrong for the next kind: autograd passes every
tensor that it saves to a hook, and keeps those that it has not released at the end of the forward.

Each distinct storage counts once and whole (a saved view keeps all of its base alive). A layer's own inputs count if
its backward needs them. Not counted are storages that outlive the backward anyway (parameters, buffers and other
constants of the module), and tensors that an autograd function stores on its context without `save_for_backward`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.profiling.spread_layers import local_storage


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
    with saved_tensors_hooks(record.pack, _unpack):
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


def _unpack(kept: _Kept) -> Tensor:
    return kept.tensor
