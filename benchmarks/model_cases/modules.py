"""Modules that are made of parts and a forward, so that a table can name them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["Build", "InOrder", "holds", "many", "sequence", "weight"]

Build = Callable[[], nn.Module]


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


class InOrder(nn.Module):
    """Blocks of a list, one after the other."""

    def __init__(self, kind: Build, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))

    def forward(self, x: Any, *rest: Any) -> Any:
        for block in self.blocks:
            x = block(x, *rest)
        return x


def many(kind: Build, blocks: int = 4) -> Build:
    return lambda: nn.ModuleList(kind() for _ in range(blocks))


def sequence(kind: Build, blocks: int = 4) -> Build:
    return lambda: nn.Sequential(*(kind() for _ in range(blocks)))
