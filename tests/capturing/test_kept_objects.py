"""Objects that are their own copies, such as registries of which there is one: runs of a capture leave no trace."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.blocks import Block, assert_trains, build


class Registry:
    """One object in every copy. It counts, notes and keeps."""

    def __init__(self) -> None:
        self.calls, self.noted, self.table, self.seen = 0, [0.0], {"calls": 0}, torch.zeros(1)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Registry":
        return self

    def count(self) -> float:
        self.calls += 1
        self.noted.append(1.0)
        self.table["calls"] += 1
        self.seen += 1
        self.last = self.calls
        return self.calls + len(self.noted) + self.table["calls"] + self.seen.item()


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Slotted":
        return self

    def count(self) -> float:
        self.calls += 1
        return self.calls


class Global:
    """Copied by its name, as singletons of other libraries are."""

    def __init__(self) -> None:
        self.calls = 0

    def __reduce__(self) -> str:
        return "GLOBAL"

    def count(self) -> float:
        self.calls += 1
        return self.calls


GLOBAL = Global()


def made_anew() -> Global:
    GLOBAL.calls = 0
    return GLOBAL


class Teacher(nn.Module):
    """A module that is shared by all copies."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Teacher":
        return self

    def count(self) -> float:
        self.calls += 1
        return float(self.calls)


class Counting(Block):
    def __init__(self, counter: Any) -> None:
        super().__init__()
        self.held = SimpleNamespace(counter=counter)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * self.held.counter.count())


KINDS: dict[str, Callable[[], Any]] = {
    "registry": Registry,
    "slots": Slotted,
    "by its name": made_anew,
    "module": Teacher,
}


@pytest.mark.parametrize("listed", [False, True], ids=["traced", "listed"])
@pytest.mark.parametrize("name", KINDS)
def test_the_numbers_are_those_of_a_plain_loop(name: str, listed: bool) -> None:
    def made() -> nn.Module:
        model = build(Block)
        model.blocks[1] = Counting(KINDS[name]()).double()
        return nn.Sequential(model.first, *model.blocks, model.last) if listed else model

    assert_trains(made, stages=2, predicts=False)
