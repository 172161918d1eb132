"""What is changed between the blocks of a model after its pipeline was built."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.capturing import capture
from penstock.capturing.outside_state import OutsideState
from penstock.capturing.read_names import names_read
from penstock.errors import PenstockError


def half(x: Tensor) -> Tensor:
    return x / 2


def scaled(model: Any, x: Tensor) -> Tensor:
    return x * model.table[0]


class Outside(nn.Module):
    """Reads attributes of many kinds between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
        self.scales = [1.0, (2.0, 3.0)]
        self.table = torch.ones(3)
        self.by_name = {"first": {"scale": 2.0}}
        self.function: Callable[[Tensor], Tensor] = half
        self.method: Callable[[Tensor], Tensor] = self.doubled
        self.losses: list[float] = []
        self.note = {"seen": 0}

    def doubled(self, x: Tensor) -> Tensor:
        return x * 2

    def log(self, loss: float) -> None:
        self.losses.append(loss)
        self.note["seen"] += 1

    @property
    def first(self) -> float:
        return self.by_name["first"]["scale"]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = scaled(self, block(x)) * self.first * getattr(self, "scales")[1][0]  # noqa: B009
        return self.method(self.function(x))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model: model.scales.append(1.0), "scales"),
        (lambda model: setattr(model, "scales", [1.0, (2.0, 4.0)]), "scales"),
        (lambda model: setattr(model, "table", model.table * 2), "table"),
        (lambda model: model.by_name["first"].update(scale=3.0), "by_name"),
        (lambda model: setattr(model, "function", F.relu), "function"),
        (lambda model: setattr(model, "function", partial(half)), "function"),
        (lambda model: setattr(model, "method", Outside().doubled), "method"),
        (lambda model: setattr(model, "doubled", half), "doubled"),
        (lambda model: delattr(model, "scales"), "scales"),
    ],
)
def test_a_change_that_a_trace_does_not_see_is_refused(change: Callable[[Any], None], named: str) -> None:
    model = Outside()
    state = OutsideState(model, capture(model, (torch.randn(2, 3),)))
    state.check()
    change(model)

    with pytest.raises(PenstockError, match=f"^{named} .* since the pipeline was built"):
        state.check()


def test_an_attribute_with_the_value_of_its_class_is_no_change() -> None:
    class Scaling(Outside):
        scale = 1.0

    model = Scaling()
    state = OutsideState(model, capture(model, (torch.randn(2, 3),)))
    model.scale = 1.0
    state.check()


def test_what_a_forward_does_not_read_may_change() -> None:
    model = Outside()
    state = OutsideState(model, capture(model, (torch.randn(2, 3),)))
    model.log(0.5)
    model.scales = [1.0, (2.0, 3.0)]
    model.table.mul_(2)

    state.check()


def test_names_are_read_by_the_forward_and_what_it_names() -> None:
    names = names_read(Outside())

    assert {"blocks", "scales", "table", "by_name", "function", "method"} <= names
    assert not {"losses", "note"} & names
