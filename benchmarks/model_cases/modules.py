"""Modules that are made of parts and a forward, so that a table can name them."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = [
    "Build", "Habit", "InOrder", "Inner", "Prepare", "adds", "holds", "in_order", "many", "sequence", "weight",
    "with_habit",
]  # fmt: skip

Build = Callable[[], nn.Module]
Inner = Callable[..., Any]
Habit = Callable[..., Any]
"""A forward: it is given the module that has the state, what it computes without the habit, and its inputs."""
Prepare = Callable[[Any], Any]
"""What is done once with a module that was made."""


class Holding(nn.Module):
    """A module with the parts that it is given, and a forward that is given the module and its inputs."""

    def __init__(self, run: Callable[..., Any], parts: dict[str, Callable[[], Any]]) -> None:
        super().__init__()
        self._run = run
        for name, make in parts.items():
            setattr(self, name, make())

    def forward(self, *inputs: Any) -> Any:
        return self._run(self, *inputs)


def holds(run: Callable[..., Any], **parts: Callable[[], Any]) -> Build:
    """Makes modules with these parts, which are made in this order."""
    return lambda: Holding(run, parts)


def weight(*shape: int, over: float = 1.0) -> Callable[[], nn.Parameter]:
    """Makes a parameter of normal numbers, divided by `over`."""
    return lambda: nn.Parameter(torch.randn(*shape) / over)


def with_habit(base: type[nn.Module]) -> Callable[..., nn.Module]:
    """The class of modules as `base`, which do something around its forward.

    They take that habit, what is done with each of them once that it is made, its state, and what `base` takes.
    """

    class WithHabit(base):  # type: ignore[misc, valid-type]
        def __init__(self, habit: Habit, prepare: Prepare | None, state: dict[str, Any], *args: Any) -> None:
            super().__init__(*args)
            self._habit = habit
            for name, value in copy.deepcopy(state).items():
                setattr(self, name, value)
            if prepare is not None:
                prepare(self)

        def forward(self, *inputs: Any, **named: Any) -> Any:
            return self._habit(self, super().forward, *inputs, **named)

    return WithHabit


def adds(**parts: Build) -> Prepare:
    """Adds modules to a module."""

    def prepare(module: nn.Module) -> None:
        for name, make in parts.items():
            module.add_module(name, make())

    return prepare


class InOrder(nn.Module):
    """Blocks of a list, one after the other."""

    def __init__(self, kind: Build, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))

    def forward(self, x: Any, *rest: Any) -> Any:
        return in_order(self.blocks, x, *rest)


def in_order(blocks: Iterable[Any], x: Any, *rest: Any) -> Any:
    """What blocks compute one after the other, all with the same further inputs."""
    for block in blocks:
        x = block(x, *rest)
    return x


def many(kind: Build, blocks: int = 4) -> Build:
    return lambda: nn.ModuleList(kind() for _ in range(blocks))


def sequence(kind: Build, blocks: int = 4) -> Build:
    return lambda: nn.Sequential(*(kind() for _ in range(blocks)))
