"""What the code of modules keeps outside of all modules: numbers and tensors in globals, classes and closures.

A block may count its calls in a global of its file. Capture runs the block, and the count must be afterwards as it was.
Only numbers and tensors are looked at, and lists and dictionaries of nothing else. A flag, a name or an object there
says what has been done once for the whole process, which is not to be done again.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capturing.module_state import content_of, put_back
from penstock.capturing.read_names import functions_read, words_of
from penstock.torch_internals.modules import hooks_of
from penstock.torch_internals.tensors import accumulated_hooks, gradient_hooks

__all__ = ["SharedState"]

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
"""With those that a trace puts in the place of sizes."""
_MOST = 1000
"""Longer lists and dictionaries are not looked at: most are tables that do not change."""


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A name that the code reads, and what it held."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    value: Any
    content: Any

    def restore(self) -> None:
        now = self.read()
        if now is not self.value and _is_state(now):
            self.write(self.value)
        if self.content is not None and _is_state(self.value):
            put_back(self.value, self.content)


class SharedState:
    """A copy of what the code of `modules` keeps outside of them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        places: dict[tuple[int, str], _Place] = {}
        seen: set[type] = set()
        for root in modules:
            for module in root.modules():
                hooks = [*hooks_of(module)]
                for parameter in module.parameters(recurse=False):
                    hooks += (*gradient_hooks(parameter), *accumulated_hooks(parameter))
                forward = [] if type(module) in seen and "forward" not in vars(module) else [module.forward]
                seen.add(type(module))
                for function in functions_read(module, forward + hooks) if forward or hooks else ():
                    for key, place in _places(function, type(module)):
                        places.setdefault(key, place)
        self._places = list(places.values())

    def restore(self) -> None:
        """Puts back what it was, where it has changed."""
        for place in self._places:
            place.restore()


def _places(function: FunctionType, kind: type) -> Iterator[tuple[tuple[int, str], _Place]]:
    """Where `function`, which a module of class `kind` runs, finds numbers and tensors, each with a key."""
    names, held = words_of(function.__code__), function.__globals__
    classes = [kind]
    for name in names & held.keys():
        value = held[name]
        if isinstance(value, type):
            classes.append(value)
        elif _is_state(value):
            yield from _found(held, name, value, partial(held.get, name), partial(held.__setitem__, name))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        value = _in_cell(cell)
        if _is_state(value):
            yield from _found(cell, name, value, partial(_in_cell, cell), partial(setattr, cell, "cell_contents"))
    for base in dict.fromkeys(base for each in classes for base in each.__mro__):
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for name in names & vars(base).keys():
            value = vars(base)[name]
            if _is_state(value):
                yield from _found(base, name, value, partial(getattr, base, name, None), partial(setattr, base, name))


def _found(
    holder: Any, name: str, value: Any, read: Callable[[], Any], write: Callable[[Any], Any]
) -> Iterator[tuple[tuple[int, str], _Place]]:
    yield (id(holder), name), _Place(read, write, value, _content_of(value))
    for entry in _entries(value):
        if isinstance(entry, Tensor):
            # What it holds. Which one it is, its container says.
            yield (id(entry), ""), _Place(partial(_itself, entry), _itself, entry, _content_of(entry))


def _itself(value: Any) -> Any:
    return value


def _in_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_state(value: Any) -> bool:
    entries = _entries(value) if isinstance(value, list | deque | dict) else (value,)
    return len(entries) <= _MOST and all(type(each) in _NUMBERS or isinstance(each, Tensor) for each in entries)


def _entries(holder: Any) -> Collection[Any]:
    """What a list or a dictionary holds."""
    return holder.values() if isinstance(holder, dict) else holder if isinstance(holder, list | deque) else ()


def _content_of(value: Any) -> Any:
    """A copy of what can change in `value`; None for what cannot."""
    if isinstance(value, Tensor) and (type(value) is not Tensor or value.is_meta):
        return None
    return content_of(value) if isinstance(value, Tensor | dict | list | deque) else None
