"""A copy that `Anew` makes is the one that `copy.deepcopy` makes, whatever the object."""

import copy
from typing import Any

import pytest
import torch
import transformers

from penstock.capturing.module_copies import Anew


class Plain:
    """Attributes and nothing else."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("__dict__", "entries")

    def __init__(self) -> None:
        self.entries, self.others = [1], [2]


class Counting:
    """Has a rule of its own: a copy knows how old it is."""

    def __init__(self, age: int = 0) -> None:
        self.age = age

    def __deepcopy__(self, memo: dict[int, Any]) -> "Counting":
        return Counting(self.age + 1)


class Listed(list[Any]):
    """A list with attributes."""


def twice() -> Plain:
    """One list in two places."""
    entries = [1]
    return Plain(first=entries, second=entries)


def circle() -> Plain:
    found = Plain()
    vars(found)["itself"] = found
    return found


def shown(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """A description of `value`; an object that is in two places is described by where it was first."""
    if id(value) in seen:
        return seen.index(id(value))
    seen = (*seen, id(value))
    if isinstance(value, dict):
        return {key: shown(entry, seen) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        entries = [shown(entry, seen) for entry in value]
        return type(value), entries, getattr(value, "__dict__", None)
    if isinstance(value, type) or not (hasattr(value, "__dict__") or hasattr(value, "__slots__")):
        return value
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return type(value), shown(getattr(value, "entries", None), seen), shown(vars(value), seen)


OBJECTS = {
    "cache": lambda: transformers.DynamicCache(config=transformers.LlamaConfig(num_hidden_layers=3)),
    "plain": lambda: Plain(number=1, entries=[Plain(kind=dict), {"a": [None]}], dtype=torch.float32),
    "slots": Slotted,
    "tensor": lambda: Plain(memory=torch.arange(3)),
    "list": lambda: Listed([[1]]),
    "keys": lambda: {(1, 2): [3]},
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_copy_is_what_deepcopy_makes_and_shares_nothing(name: str) -> None:
    value = OBJECTS[name]()
    expected = shown(copy.deepcopy(value))
    anew = Anew(value)

    first = anew.make()
    assert first is not value
    assert type(first) is type(value)
    assert shown(first) == expected
    change(first)
    change(value)
    assert shown(anew.make()) == shown(OBJECTS[name]())


def test_rules_of_an_object_hold() -> None:
    # Once when it is kept, and once when it is copied.
    assert Anew(Plain(inner=Counting())).make().inner.age == 2


@pytest.mark.parametrize("make", [twice, circle])
def test_what_is_in_two_places_has_one_copy(make: Any) -> None:
    value = make()
    made = Anew(value).make()

    names = list(vars(value))
    assert len({id(getattr(made, name)) for name in names}) == 1
    assert getattr(made, names[0]) is not getattr(value, names[0])


def test_a_cache_is_copied_without_deepcopy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has an entry for every block, and every block gets a copy."""
    anew = Anew(OBJECTS["cache"]())
    monkeypatch.setattr(copy, "deepcopy", None)

    assert len(anew.make().layers) == 3


def change(value: Any) -> None:
    """Changes what can be changed in it, at all depths."""
    for entry in [*value.values()] if isinstance(value, dict) else [*value] if isinstance(value, list) else []:
        change(entry)
    if isinstance(value, list):
        value.append("changed")
    elif isinstance(value, torch.Tensor):
        value.zero_()
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for entry in vars(value).values():
            change(entry)
        value.changed = True
