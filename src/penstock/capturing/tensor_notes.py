"""A note for each tensor, by which tensor it is and not by its numbers."""

from collections.abc import Iterable
from typing import Generic, TypeVar
from weakref import ref

from torch import Tensor

_Note = TypeVar("_Note")


class TensorNotes(Generic[_Note]):
    """Notes for the tensors of one run. It keeps no tensor alive, and looks notes up for every operator of a run."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[ref[Tensor], _Note]] = {}

    def write(self, tensors: Iterable[Tensor], note: _Note) -> None:
        """Writes `note` for each of `tensors`, in place of what it had."""
        for tensor in tensors:
            self._notes[id(tensor)] = ref(tensor), note

    def read(self, tensor: Tensor) -> _Note | None:
        """The note of `tensor`; None if it has none."""
        found = self._notes.get(id(tensor))
        # Another tensor may have had the id.
        return found[1] if found is not None and found[0]() is tensor else None
