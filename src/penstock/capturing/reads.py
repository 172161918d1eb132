"""What the code between the blocks of a model has read, and whether it would read something else now.

Blocks are called as the Python that they are, and a change of them counts as in a plain loop. The code between them was
traced once, with what it read then: the attributes, members of containers, globals and closures are constants of the
trace. Each of these *places* is kept with what it held, whatever its type is, and compared before a step.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import contains, getitem, is_
from types import MethodType
from typing import Any, Protocol, cast

import numpy
import torch
from torch import Tensor, nn

from penstock.capturing.module_state import is_plain
from penstock.torch_internals.modules import HOOK_TABLES, TENSOR_TABLES

_DEEPEST = 16
"""Containers that are nested deeper than this are compared by which they are."""
NOTHING = object()
"""What a place holds where there is nothing under its name."""


_ARRAYS = (numpy.ndarray, array, bytearray)
_NUMBERS = (bool, int, float, complex)


class Table(Protocol):
    """A dictionary, or what is read like one."""

    def get(self, key: Any, default: Any, /) -> Any: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __contains__(self, key: Any, /) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class Called:
    """A table of one place, such as a slot or a cell, which only a call of `function` reads."""

    function: Callable[[], Any]

    def get(self, key: Any, default: Any, /) -> Any:
        try:
            return self.function()
        except (AttributeError, ValueError):
            return default

    def __getitem__(self, key: Any, /) -> Any:
        return self.get(key, NOTHING)

    def __contains__(self, key: Any, /) -> bool:
        return self[key] is not NOTHING


@dataclass(slots=True, eq=False)
class _Place:
    name: str
    """Such as ``blocks.1.active``."""
    table: Table
    key: Any
    held: Any
    content: Any
    """Of `held`, when it was read."""


@dataclass(frozen=True, slots=True)
class Change:
    """A place that holds something else than it did: its name, and the contents before and now."""

    name: str
    key: Any
    before: Any
    now: Any

    @classmethod
    def of(cls, name: str, key: Any, before: Any, now: Any) -> "Change":
        """The change of a place; where it holds dictionaries, that of the first entry that differs."""
        if _is_dict(before) and _is_dict(now):
            one, other = dict(before[1]), dict(now[1])
            for inner in {**one, **other}:
                if one.get(inner, _GONE) != other.get(inner, _GONE):
                    where = f"{name}.{inner}" if isinstance(inner, str) else f"{name}[{inner!r:.40}]"
                    return cls.of(where.lstrip("."), key, one.get(inner, _GONE), other.get(inner, _GONE))
        return cls(name, key, before, now)

    def __str__(self) -> str:
        before, now = map(_shown, (self.before, self.now))
        return f"{self.name} was {before} and is {now if now != before else 'another one'}"


class Reads:
    """The places that were read."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, Any], _Place] = {}
        self._stale = True
        """Whether the lists below are to be made of the places."""
        self._held: tuple[list[Table], list[Any], list[Any]] = [], [], []
        """Of the places that hold something: the tables, the keys and the values."""
        self._empty: tuple[list[Table], list[Any]] = [], []
        """Of the others, the tables and the keys."""
        self._parts: list[Any] = []
        """The containers among the values, and the values of those that are dictionaries."""
        self._sizes: list[int] = []
        self._members: tuple[list[Any], list[Any]] = [], []
        """Those parts that hold no numbers, one after the other, and their members."""
        self._numbers: tuple[list[Any], list[Any]] = [], []
        """The same of the others, since numbers of two types may be equal."""
        self._arrays: list[tuple[Any, Any]] = []
        """With their content."""

    def __len__(self) -> int:
        return len(self._places)

    def note(self, name: str, table: Table, key: Any) -> bool:
        """Keeps what `table` holds as `key` now. False if that was kept before. A `Called` has a key of its own."""
        place = key if isinstance(table, Called) else (id(table), key)
        if place in self._places:
            return False
        held = table.get(key, NOTHING)
        self._places[place] = _Place(name, table, key, held, content_of(held))
        self._stale = True
        return True

    def without(self, key: str = "", *, tensors: bool = False) -> "Reads":
        """All places but those under `key`; if `tensors`, but those of tensors and of tables of modules."""
        rest, kinds = Reads(), (Tensor,) if tensors else ()
        left_out = {key, *(TENSOR_TABLES if tensors else ())}
        kept = {number: place for number, place in self._places.items() if not isinstance(place.held, kinds)}
        rest._places = {number: place for number, place in kept.items() if place.key not in left_out}
        return rest

    def extend(self, other: "Reads") -> None:
        """Adds the places of `other`."""
        self._places = {**other._places, **self._places}
        self._stale = True

    @contextmanager
    def modes_as_read(self) -> Iterator[None]:
        """Gives modules the modes that were read, in a ``with`` block."""
        places = [place for place in self._places.values() if place.key == "training"]
        now = [place.table.get("training", NOTHING) for place in places]
        try:
            for place in places:
                cast("dict[str, Any]", place.table)["training"] = place.held
            yield
        finally:
            for place, mode in zip(places, now, strict=True):
                cast("dict[str, Any]", place.table)["training"] = mode

    def change(self) -> Change | None:
        """The first place that holds something else, if there is one.

        Nearly always there is none, and a few calls of C compare all places by identity. An equal number in another
        object is no change.
        """
        if not self._stale and self._same():
            return None
        for place in self._places.values():
            now = place.table.get(place.key, NOTHING)
            if now is not place.held or _members_of(now) or isinstance(now, _ARRAYS):
                if content_of(now) != place.content:
                    return Change.of(place.name, place.key, place.content, content_of(now))
                place.held = now
        self._refresh()
        return None

    def _same(self) -> bool:
        tables, keys, values = self._held
        try:
            return (
                all(map(is_, map(getitem, tables, keys), values))
                and not any(map(contains, *self._empty))
                and list(map(len, self._parts)) == self._sizes
                # Lists compare their members by identity first.
                and list(chain.from_iterable(self._members[0])) == self._members[1]
                and all(map(is_, chain.from_iterable(self._numbers[0]), self._numbers[1]))
                and all([content_of(value) == content for value, content in self._arrays])
            )
        except Exception:
            # A key is gone, or two tensors cannot be compared.
            return False

    def _refresh(self) -> None:
        places = self._places.values()
        held, empty = ([each for each in places if (each.held is NOTHING) is gone] for gone in (False, True))
        self._held = [each.table for each in held], [each.key for each in held], [each.held for each in held]
        self._empty = [each.table for each in empty], [each.key for each in empty]
        parts: dict[int, Any] = {}
        waiting, seen = [*self._held[2]], []
        while waiting:
            value = waiting.pop()
            seen.append(value)
            if id(value) not in parts and (members := _members_of(value)):
                parts.update((id(part), part) for part in members)
                for part in members:
                    waiting += part
        self._parts = list(parts.values())
        self._sizes = list(map(len, self._parts))
        counted = [any(isinstance(each, _NUMBERS) for each in part) for part in self._parts]
        for found, numbers in ((self._members, False), (self._numbers, True)):
            found[0][:] = [part for part, own in zip(self._parts, counted, strict=True) if own is numbers]
            found[1][:] = chain.from_iterable(found[0])
        self._arrays = [(value, content_of(value)) for value in seen if isinstance(value, _ARRAYS)]
        self._stale = False


def content_of(value: Any, own: Callable[[Any], Any] = lambda value: value, depth: int = 0) -> Any:
    """What `value` holds, to be compared: containers and arrays by their content, and all but plain values by which
    they are. `own`: what an object is a copy of. `depth`: how many containers are around it.
    """
    inner = partial(content_of, own=own, depth=depth + 1)
    match value:
        case _ if is_plain(value):
            return type(value), repr(value)
        case _ if depth > _DEEPEST:
            return Same(own(value))
        case list() | tuple() | deque():
            return type(value), tuple(map(inner, value))
        case dict():
            return dict, tuple([(key, inner(each)) for key, each in value.items()])
        case set() | frozenset():
            return set, frozenset(map(inner, value))
        case partial():
            return partial, inner((value.func, value.args, value.keywords))
        case MethodType():
            return id(own(value.__self__)), value.__func__
        case _ if isinstance(value, _ARRAYS):
            return type(value), getattr(value, "dtype", None), bytes(memoryview(cast(Any, value)))
        case _:
            return Same(own(value))


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """An object that equals itself only."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


_GONE = Same(NOTHING)


def _members_of(value: Any) -> Iterable[Any]:
    """What `value` keeps members in, which may change while it is the same object."""
    match value:
        case dict():
            return value, value.values()
        case list() | tuple() | deque() | set() | frozenset():
            return (value,)
        case partial():
            return value.args, value.keywords, value.keywords.values()
        case _:
            return ()


def _is_dict(content: Any) -> bool:
    return isinstance(content, tuple) and content[0] is dict


def _shown(content: Any) -> str:
    match content:
        case Same(value):
            return "not there" if value is NOTHING else f"a {type(value).__qualname__}"
        case (_, str(text)):
            return text[:60]
        case (type() as kind, *_):
            return f"a {kind.__name__}"
        case _:
            return "a method"


def note_module(reads: Reads, path: str, module: nn.Module, *, mode: bool = True) -> None:
    """Notes what a call of `module`, which is no block, depends on beside its code. `mode`: its mode as well."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    for key in (*sorted(TENSOR_TABLES), *HOOK_TABLES, "forward", *(("training",) if mode else ())):
        name = {**dict.fromkeys(TENSOR_TABLES, ""), **dict.fromkeys(HOOK_TABLES, "hooks")}.get(key, key)
        reads.note(f"{path}.{name}".strip("."), vars(module), key)
