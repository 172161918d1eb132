"""Tensors that leave a module by another way than as its result: in an attribute, a cache, or by a hook.

A block that is not traced hands on its results only. What else comes out of it would be missing in a trace, or would be
that of the sample for ever, so such a block is traced like the code between blocks.
"""

from collections.abc import Collection, Iterable

from torch import Tensor

from penstock.capturing.tensor_notes import TensorNotes


class TensorOwners:
    """Follows, in one run of a model, which module may use a tensor: the one that made it or got it as a result."""

    def __init__(self) -> None:
        self.escapes: set[tuple[str, str]] = set()
        """The modules, by path, that a tensor escaped from, each with one that used it."""
        self._owners: TensorNotes[str] = TensorNotes()

    def note(self, path: str, used: Iterable[Tensor], made: Iterable[Tensor]) -> None:
        """Notes that the module `path` computes `made` of `used`."""
        for tensor in used:
            owner = self._owners.read(tensor)
            if owner is not None and owner != path and not is_inside(path, owner):
                self.escapes.add((owner, path))
        self._owners.write(made, path)

    def returned(self, path: str, caller: str, results: Iterable[Tensor]) -> None:
        """Notes that the module `path` returns `results` to `caller`, or, with equal paths, that the model ends."""
        for tensor in results:
            owner = self._owners.read(tensor)
            if owner is None or (owner != path and is_inside(path, owner)):
                continue
            if owner != path:
                self.escapes.add((owner, path))
            self._owners.write((tensor,), caller)


def is_inside(path: str, outer: str) -> bool:
    """Whether the module or attribute `path`, such as ``layer.memory[0]``, is `outer` or in it."""
    return outer in ("", path) or path.startswith((f"{outer}.", f"{outer}["))


def leaky(block: str, escapes: Collection[tuple[str, str]]) -> bool:
    """Whether a tensor escapes from `block` to a module outside of it."""
    return any(is_inside(owner, block) and not is_inside(user, block) for owner, user in escapes)
