"""What the code of a function names, without running it."""

from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn


class FunctionModule(nn.Module):
    """A plain callable as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def modules_read(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that the code of `function` finds in its file."""
    inner = function_in(function)
    if inner is None:
        return []
    words = words_of(inner.__code__)
    return [each for name, each in inner.__globals__.items() if name in words and isinstance(each, nn.Module)]


def function_in(value: Any) -> FunctionType | None:
    """The Python function that a call of `value` runs; None if there is none."""
    while True:
        match value:
            case FunctionType():
                return value if value.__module__ is not None else None
            case MethodType() | staticmethod() | classmethod():
                value = value.__func__
            case property():
                value = value.fget
            case partial():
                value = value.func
            case _:
                # A decorated function holds the one that it was made of.
                inner = getattr(value, "__wrapped__", None) if callable(value) else None
                if inner is None or inner is value:
                    return None
                value = inner


def closure_of(function: FunctionType) -> dict[str, Any]:
    """What the function holds of the function that it was made in."""
    held = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:
            # It has no value yet.
            continue
    return held


def words_of(code: CodeType) -> set[str]:
    """All names and words in `code`, which may be those of attributes."""
    words = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            words.add(constant)
        elif isinstance(constant, CodeType):
            words |= words_of(constant)
    return words
