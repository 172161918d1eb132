"""Moves what autograd saved in a forward out of the device's memory, and back before the backward.

Autograd keeps a small object in place of each tensor that it saves, which gives the tensor back to the backward. To
offload a microbatch is to copy the memory behind these objects to a store, and to drop the tensors. To reload it is to
copy the memory back, and to make the same views of it.

Only memory that nothing else holds is moved, because other memory would not get free: not that of parameters and
buffers, of weight versions, of what the stage received and sends, and of what a module or another microbatch keeps.
So nothing has to know what these are: the tensors that have a storage are counted.

Laws of this file:
  1. A storage is moved once, however many saved tensors are views of it. They come back with their shape, strides,
     type and bits, as views of one storage.
  2. A tensor that is away raises an error when it is read: no backward finds other numbers.
  3. A tensor that was written in place after it was saved is not moved, and raises autograd's error when it is read.
     Autograd itself compares no versions of what hooks have packed.
  4. Memory is dropped only after its copy to the store, and a slot of the store is released only after the copy back.
  5. What autograd frees during a backward is freed at once: nothing here keeps a saved tensor that is on the device.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import PenstockError
from penstock.runtime.devices.host_stores import MemoryStore
from penstock.runtime.devices.staging import Staged
from penstock.torch_internals.tensors import storage_key, storage_references, times_written

_CPU = torch.device("cpu")


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Saved:
    """What autograd keeps in place of a tensor; `tensor` is None while it is away."""

    tensor: Tensor | None
    times_written: int

    def read(self) -> Tensor:
        tensor = self.tensor
        if tensor is None:
            raise PenstockError(
                "a backward reads a tensor that is offloaded: expected that its microbatch is reloaded before. Put a "
                "Reload of the microbatch before its backward; penstock.verify shows the row"
            )
        if (found := times_written(tensor)) != self.times_written:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {found}; expected version {self.times_written} "
                "instead."
            )
        return tensor

    def movable(self, device: torch.device) -> Tensor | None:
        """The tensor, if it is nothing but elements in a storage on such a `device`, and is as it was saved."""
        tensor = self.tensor
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type != device.type:
            return None
        special = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
        empty = tensor.untyped_storage().nbytes() == 0
        return None if special or empty or times_written(tensor) != self.times_written else tensor

    def leave(self, tensor: Tensor) -> "_View":
        """Drops `tensor`, its own. Returns what it is as a view of its storage."""
        self.tensor = None
        return _View(ref(self), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


class _View(NamedTuple):
    """A saved tensor as a view of its storage."""

    saved: "ref[_Saved]"
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def restore(self, memory: Tensor) -> None:
        """Gives the saved tensor back, in `memory`: all bytes of its storage."""
        saved = self.saved()
        if saved is not None:
            whole = memory[: len(memory) // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
            saved.tensor = whole.as_strided(self.shape, self.strides, self.offset)
            saved.times_written = times_written(saved.tensor)


class _Leaving(NamedTuple):
    """Memory on its way to the store, kept until its copy has ended."""

    memories: Sequence[Tensor]
    slots: Sequence[Tensor]
    copying: Staged
    until: int
    """The number of the forward or backward for which it is dropped."""


@dataclass(slots=True, eq=False)
class Offloads:
    """The copies of one rank to and from `store`, on their way.

    The memory of a microbatch is dropped when the forward or backward begins that its `offload` names: until then its
    copy has time. What is computed from then on comes after the copy, so that it can reuse the memory.
    """

    store: MemoryStore
    device: torch.device = _CPU
    """The device whose memory is to get free."""
    leaving: list[_Leaving] = field(default_factory=list)
    """The memory that is copied."""
    _begun: int = 0
    """The forwards and backwards that have begun."""

    def begin_computation(self) -> None:
        """Drops what is free from this forward or backward on. While nothing is `leaving` it need not be called."""
        self._begun += 1
        self._wait([each for each in self.leaving if each.until <= self._begun])

    def send(self, memories: Sequence[Tensor], behind: int) -> Sequence[Tensor]:
        """Starts to copy `memories` to the store, and drops them for the forward or backward number `behind`."""
        slots, copying = self.store.put(memories)
        self.leaving.append(_Leaving(memories, slots, copying, self._begun + behind))
        return slots

    def bring(self, slots: Sequence[Tensor]) -> tuple[Sequence[Tensor], Staged]:
        """Starts to copy `slots` back. The copies to them have ended before."""
        self._wait([each for each in self.leaving if each.slots is slots])
        return self.store.fetch(slots)

    def take(self, slots: Sequence[Tensor], copying: Staged | None) -> None:
        """Has what is computed from now on come after this copy back, if there is one, and releases its slots."""
        if copying is not None:
            self.store.wait(copying)
        self.store.release(slots, copying)

    def _wait(self, leaving: Sequence[_Leaving]) -> None:
        for each in leaving:
            self.leaving = [other for other in self.leaving if other is not each]
            self.store.wait(each.copying)


class SavedTensors:
    """What autograd saves in the forward of one microbatch, where it is to be offloaded."""

    def __init__(self, offloads: Offloads) -> None:
        self._offloads = offloads
        self._saved: list[ref[_Saved]] = []
        """Weak, since autograd frees what it saved while the backward goes on."""
        self._away: list[list[_View]] = []
        """By storage: its views."""
        self._slots: Sequence[Tensor] = ()
        self._coming: tuple[Sequence[Tensor], Staged] | None = None

    def recording(self) -> AbstractContextManager[None]:
        """The context of the forward. What a block saves by hooks of its own stays as the block has it."""
        return saved_tensors_hooks(self._pack, _Saved.read)

    def offload(self, behind: int) -> None:
        """Starts to move what only this microbatch holds to the store, and drops it for the forward or backward number
        `behind`.
        """
        groups: dict[int, list[tuple[_Saved, Tensor]]] = {}
        for saved in filter(None, [each() for each in self._saved]):
            tensor = saved.movable(self._offloads.device)
            if tensor is not None:
                groups.setdefault(storage_key(tensor.untyped_storage()), []).append((saved, tensor))
        memories = []
        with _outside_of_autograd():
            for group in groups.values():
                _, tensor = group[0]
                storage = tensor.untyped_storage()
                if storage_references(storage) == len(group):
                    memories.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
                    self._away.append([saved.leave(own) for saved, own in group])
            self._slots = self._offloads.send(memories, behind)

    def reload(self) -> None:
        """Starts to bring back what is away."""
        with _outside_of_autograd():
            self._coming = self._offloads.bring(self._slots)

    def finish(self) -> None:
        """Has what is computed from now on find all of it. Raises `PenstockError` if it was not reloaded."""
        if self._coming is not None:
            memories, copying = self._coming
            self._offloads.take(self._slots, copying)
            with _outside_of_autograd():
                for memory, views in zip(memories, self._away, strict=True):
                    for view in views:
                        view.restore(memory)
            self._away, self._slots, self._coming = [], (), None

    def _pack(self, tensor: Tensor) -> _Saved:
        # A parameter is read through itself, which is pointed at the weights of the forward before a backward.
        own = tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()
        saved = _Saved(own, times_written(tensor))
        self._saved.append(ref(saved))
        return saved


@contextmanager
def _outside_of_autograd() -> Iterator[None]:
    """A context that records nothing, and in which tensors are made that a backward can read: a drain may be called in
    inference mode.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
