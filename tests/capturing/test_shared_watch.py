"""Writes of shared objects that the code of blocks does not show are seen in `rehearse` and under check="strict"."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from support.blocks import Block, batches, build, sgd, squares


class Hiding(Block):
    """Finds what it shares without its name."""

    def __init__(self, shared: Any, writes: bool) -> None:
        super().__init__()
        self.shared, self.writes = shared, writes

    def forward(self, x: Tensor) -> Tensor:
        for held in vars(self).values():
            if self.writes and not isinstance(held, dict | bool | set | type(None)):
                change(held, x)
        return super().forward(x) * 2.0


def change(held: Any, x: Tensor) -> None:
    match held:
        case SimpleNamespace():
            held.scale = x.abs().max().item()
        case list():
            held.append(0)
        case Tensor():
            held.add_(1)


KINDS = {
    "object": (lambda: SimpleNamespace(scale=1.0), r"shared\.scale"),
    "list": (lambda: [1], "shared"),
    "tensor": (lambda: torch.zeros(2), "shared"),
    "object in one": (lambda: SimpleNamespace(inner=[1], scale=1.0), r"shared\.scale"),
}


def hiding(name: str) -> nn.Module:
    shared = KINDS[name][0]()
    writers = iter([True, False, False, False])
    return build(lambda: Hiding(shared, next(writers)))


@pytest.mark.parametrize("name", KINDS)
def test_check_strict_names_the_object_and_the_block(name: str) -> None:
    x, target = batches((6,))[0]
    text = rf"the forward of blocks\.0 \(Hiding\) changes {KINDS[name][1]}, which blocks of another stage hold"
    with (
        penstock.Pipeline(hiding(name), (x[:2],), squares, sgd, stages=3, microbatches=2, check="strict") as pipe,
        pytest.raises(penstock.PenstockError, match=text),
    ):
        pipe.step(x, target)


def test_rehearse_names_the_object_and_the_block() -> None:
    x, target = batches((6,))[0]
    options: dict[str, Any] = {"sample": (x[:2],), "loss_fn": squares, "optimizer": sgd, "microbatches": 2}
    with pytest.raises(penstock.PenstockError, match=r"the forward of blocks\.0 \(Hiding\) changes shared\.scale"):
        penstock.rehearse(partial(hiding, "object"), [(x, target)], stages=3, **options)


def test_what_is_only_read_passes() -> None:
    x, target = batches((6,))[0]
    model = hiding("object")
    model.blocks[0].writes = False  # type: ignore[index, union-attr]
    with penstock.Pipeline(model, (x[:2],), squares, sgd, stages=3, microbatches=2, check="strict") as pipe:
        pipe.step(x, target)
        pipe.predict(x)
