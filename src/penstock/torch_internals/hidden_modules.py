"""Hiding what is registered with modules from a search through them."""

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from penstock.torch_internals.modules import TENSOR_TABLES


class UsedHidden(BaseException):
    """Code used what is hidden from it. Code that catches every `Exception` does not catch this."""


class HiddenModules:
    """Hides the parameters, buffers and modules in `modules` from code that lists them; code that names one gets it.

    `torch.export` lists all weights of a model, makes a fake tensor and an input of the trace of each, and looks
    through all modules a dozen times. Of blocks that are not traced it needs none, and it would take half of its time.

    No public name leaves modules out. This replaces the three tables of each module; where they are gone, nothing is
    hidden.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._watches = False
        self._tables = [
            (vars(module), name, vars(module)[name])
            for module in dict.fromkeys(inner for module in modules for inner in module.modules())
            for name in TENSOR_TABLES
            if type(vars(module).get(name)) is dict
        ]

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hides them for its body."""
        for held, name, table in self._tables:
            held[name] = _HiddenTable(self, table, of_modules=name == "_modules")
        try:
            yield
        finally:
            for held, name, table in self._tables:
                held[name] = table

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raises `UsedHidden` where its body names a hidden tensor, or lists what is hidden and would find less than
        there is. Outside of it `torch.export` may look.
        """
        self._watches = True
        try:
            yield
        finally:
            self._watches = False

    def note(self) -> None:
        """Notes that a table was used."""
        if self._watches:
            raise UsedHidden


class _HiddenTable(MutableMapping[str, Any]):
    """A table that has its entries and lists none."""

    def __init__(self, owner: HiddenModules, table: dict[str, Any], *, of_modules: bool) -> None:
        self._owner, self._table, self._of_modules = owner, table, of_modules

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def __getitem__(self, name: str) -> Any:
        if not self._of_modules:
            self._owner.note()
        # What is registered with the module that it finds is hidden, too.
        return self._table[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._owner.note()
        self._table[name] = value

    def __delitem__(self, name: str) -> None:
        self._owner.note()
        del self._table[name]

    def __iter__(self) -> Iterator[str]:
        self._owner.note()
        return iter(())

    def __len__(self) -> int:
        self._owner.note()
        return 0

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        self._owner.note()
        return dict(self._table)
