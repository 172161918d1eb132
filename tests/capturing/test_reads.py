"""What the code between the blocks of a model has read, and what of it has changed since."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.capturing import capture
from penstock.capturing.reads import Reads
from penstock.errors import CaptureError


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


def read(model: Any) -> tuple[Any, Reads]:
    return model, capture(model, (torch.randn(2, 3),)).reads


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model: model.scales.append(1.0), "scales was a list and is another one"),
        (lambda model: setattr(model, "scales", [1.0, (2.0, 4.0)]), "scales was a list and is another one"),
        (lambda model: setattr(model, "table", model.table * 2), "table was a Tensor and is another one"),
        (lambda model: model.by_name["first"].update(scale=3.0), "by_name.first.scale was 2.0 and is 3.0"),
        (lambda model: model.by_name["first"].update(scale=2), "by_name.first.scale was 2.0 and is 2"),
        (lambda model: setattr(model, "function", F.relu), "function was a function and is another one"),
        (lambda model: setattr(model, "function", partial(half)), "function was a function and is a partial"),
        (lambda model: setattr(model, "method", Outside().doubled), "method was a method and is another one"),
        (lambda model: delattr(model, "scales"), "scales was a list and is not there"),
        (lambda model: model.blocks.append(nn.Tanh()), "blocks.2 was not there and is a Tanh"),
        (lambda model: model.eval(), "training was True and is False"),
    ],
)
def test_a_change_of_what_was_read_is_named(change: Callable[[Any], None], text: str) -> None:
    model, reads = read(Outside())
    assert reads.change() is None
    change(model)

    assert str(reads.change()) == text


def test_equal_values_in_other_objects_are_no_change() -> None:
    class Scaling(Outside):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    model, reads = read(Scaling())
    model.scales = [1.0, (2.0, 3.0)]
    model.by_name = {"first": {"scale": float("2.0")}}
    assert reads.change() is None

    # The new objects are compared from now on.
    model.by_name["first"]["scale"] = 2.5
    assert str(reads.change()) == "by_name.first.scale was 2.0 and is 2.5"


def test_what_a_forward_does_not_read_may_change() -> None:
    model, reads = read(Outside())
    model.log(0.5)
    model.table.mul_(2)
    model.blocks[0].register_forward_hook(lambda *_: None)

    assert reads.change() is None


def test_a_list_in_itself_is_compared() -> None:
    table: dict[str, Any] = {"values": [1.0]}
    table["values"].append(table["values"])
    reads = Reads()
    reads.note("values", table, "values")
    assert reads.change() is None
    table["values"].append(2.0)

    assert reads.change() is not None


def test_what_a_block_changes_and_the_root_reads_is_refused() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Counting(3, 3) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x / self.blocks[0].calls

    with pytest.raises(CaptureError, match=r"^blocks.0.calls is read outside of the model's blocks"):
        capture(Reading(), (torch.randn(2, 3),))


def test_a_cache_that_the_first_run_fills_may_be_filled_later() -> None:
    class Caching(Outside):
        width: int | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.width is None:
                self.width = x.shape[-1]
            return super().forward(x) / self.width

    model, reads = read(Caching())
    model(torch.randn(2, 3))

    assert reads.change() is None


def test_what_the_evaluation_reads_is_compared_once_it_is_captured() -> None:
    class Evaluating(Outside):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.0 if self.training else self.factor)

    model = Evaluating()
    chain = capture(model, (torch.randn(2, 3),))
    model.factor = 2.0
    assert chain.reads.change() is None
    chain.evaluation()
    model.factor = 3.0

    assert str(chain.reads.change()) == "factor was 2.0 and is 3.0"
