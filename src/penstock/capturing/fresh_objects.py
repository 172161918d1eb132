"""Objects that a model makes anew in every forward, such as an empty cache of keys and values.

A block that is given one may write in it, so every call gets a copy of its own. A cache has an entry for every block:
`copy.deepcopy` for every block of a deep model takes longer than the blocks compute. So most objects are pickled once.
"""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.torch_internals.export import traced_constant

PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_PLAIN_TYPES = frozenset(PLAIN)


def is_plain(leaf: Any) -> bool:
    """Whether `leaf` is a constant that two calls can be compared by."""
    return type(leaf) in _PLAIN_TYPES or isinstance(leaf, PLAIN)


class Anew:
    """Makes copies of an object as it is now."""

    def __init__(self, value: Any) -> None:
        self.make: Callable[[], Any]
        """A copy: what `copy.deepcopy` returns."""
        pickled = io.BytesIO()
        constants: list[Tensor] = []
        try:
            _Pickler(pickled, constants).dump(value)
        except Exception:
            kept = copy.deepcopy(value)
            self.make = lambda: copy.deepcopy(kept)
        else:
            content = pickled.getvalue()
            self.make = lambda: _Unpickler(content, constants).load()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Anew":
        return self


class _Pickler(pickle.Pickler):
    """Pickles what `copy.deepcopy` copies in the same way. Numbers that a trace was made of go to `constants`."""

    def __init__(self, file: io.BytesIO, constants: list[Tensor]) -> None:
        super().__init__(file)
        self._constants = constants

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, Tensor) and (constant := traced_constant(value)) is not None:
            self._constants.append(constant)
            return len(self._constants) - 1
        if hasattr(value, "__deepcopy__") and not is_plain(value):
            raise pickle.PicklingError(f"a {type(value).__name__} has a rule of its own for copies")
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, constants: list[Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self._constants = constants

    def persistent_load(self, number: int) -> Tensor:
        return self._constants[number].clone()
