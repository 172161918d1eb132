"""Objects that a model makes anew in every forward, such as an empty cache of keys and values.

A block that is given one may write in it, so every call gets a copy of its own. A cache has an entry for every block:
`copy.deepcopy` for every block of a deep model takes longer than the blocks compute. So what there is to copy is read
once, and a copy makes nothing but the objects.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.torch_internals.export import traced_constant

_Make = Callable[[], Any]
_RULES = (
    *("__new__", "__setattr__", "__copy__", "__deepcopy__"),
    *("__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__", "__getstate__", "__setstate__"),
)
"""What says how an object is made and copied."""
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_PLAIN_TYPES = frozenset(PLAIN)


def is_plain(leaf: Any) -> bool:
    """Whether `leaf` is a constant that two calls can be compared by."""
    return type(leaf) in _PLAIN_TYPES or isinstance(leaf, PLAIN)


class Anew:
    """Makes copies of an object as it is now."""

    def __init__(self, value: Any) -> None:
        self.make: _Make
        """A copy: what `copy.deepcopy` returns."""
        try:
            self.make = _maker(value, set()) or (lambda: value)
        except _Unusual:
            kept = copy.deepcopy(value)
            self.make = lambda: copy.deepcopy(kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Anew":
        return self


class _Unusual(Exception):
    """Found an object that only `copy.deepcopy` knows how to copy."""


def _maker(value: Any, seen: set[int]) -> _Make | None:
    """What makes a copy of `value`; None if it is its own. `seen`: the ids of the objects around it and before it.

    Raises `_Unusual` for an object with rules of its own, and for one in two places, which are to have one copy.
    """
    if is_plain(value) or isinstance(value, type):
        return None
    if id(value) in seen:
        raise _Unusual
    seen.add(id(value))
    kind: type = type(value)
    if isinstance(value, Tensor) and (constant := traced_constant(value)) is not None:
        return constant.clone
    if kind is list:
        entries = _dict_maker(dict(enumerate(value)), seen)
        return lambda: [*entries().values()]
    if kind is dict and all(map(is_plain, value)):
        return _dict_maker(value, seen)
    if not _is_ordinary(kind):
        raise _Unusual
    attributes = _dict_maker(vars(value), seen)

    def make() -> Any:
        made: Any = object.__new__(kind)
        made.__dict__ = attributes()
        return made

    return make


def _dict_maker(value: dict[Any, Any], seen: set[int]) -> Callable[[], dict[Any, Any]]:
    # Most entries are plain, which their type says at once.
    others = [(key, entry) for key, entry in value.items() if type(entry) not in _PLAIN_TYPES]
    makers = {key: made for key, entry in others if (made := _maker(entry, seen)) is not None}
    lasting = {key: None if key in makers else entry for key, entry in value.items()}
    if not makers:
        return lasting.copy

    def make() -> dict[Any, Any]:
        made = lasting.copy()
        for key, make_entry in makers.items():
            made[key] = make_entry()
        return made

    return make


@cache
def _is_ordinary(kind: type) -> bool:
    """Whether objects of this class are nothing but their attributes."""
    return (
        all(getattr(kind, name, None) is getattr(object, name, None) for name in _RULES)
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
        and kind.__dictoffset__ != 0
    )
