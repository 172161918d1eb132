"""Blocks that are refused with a way out: programs of torch.jit, reentrant checkpoints, and writers of what a backward
reads.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import penstock
from model_cases.habit_blocks import KINDS
from model_cases.modules import InOrder
from penstock.capturing import capture
from penstock.errors import CaptureError
from support.blocks import WIDTH, Block, assert_trains, batches, build


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_that_would_be_a_block_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"blocks\.0 is a program of torch\.jit.* Put it in a module of Python"):
        capture(build(lambda: torch.jit.script(Block())), (batches((6,))[0][0],))


class AveragedTarget(Block):
    """A target that its own forward averages, and that it reads as it is or as a copy."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.target = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.target.weight.mul_(0.9).add_(self.linear.weight, alpha=0.1)
        weight = self.target.weight
        return super().forward(x) + nn.functional.linear(x, weight.clone() if self.copies else weight)


@pytest.mark.parametrize("schedule", ["1f1b-flush", "zb-h1"])
def test_a_block_that_writes_what_its_backward_reads_trains_on_a_copy(schedule: str) -> None:
    assert_trains(partial(InOrder, partial(AveragedTarget, copies=True)), schedule, 2)

    with pytest.raises(penstock.PenstockError, match=r"written in place after its forward.*self\.weight\.clone"):
        assert_trains(partial(InOrder, partial(AveragedTarget, copies=False)), schedule, 2)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"the backward of Stack fails on the sample: .* needs use_reentrant=False"):
        capture(build(KINDS["Reentrant"]), (batches((6,))[0][0],))


class Freezing(Block):
    """Freezes its own weight in its second run."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.linear.weight.requires_grad_(self.runs < 2)
        return super().forward(x)


def test_a_forward_that_freezes_a_parameter_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"the backward of Stack fails .* no forward may change requires_grad"):
        capture(build(Freezing), (batches((6,))[0][0],))


class Penalized(Block):
    """Adds the gradient of its output by its input."""

    def __init__(self, enables: bool) -> None:
        super().__init__()
        self.enables = enables

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad() if self.enables else nullcontext():
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = super().forward(x)
            return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def build_in_a_row(kind: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(kind(), kind()).double()


@pytest.mark.parametrize("make", [build, build_in_a_row], ids=["traced", "in a row"])
def test_gradients_in_a_forward_need_enable_grad(make: Callable[[Callable[[], nn.Module]], nn.Module]) -> None:
    sample = (batches((6,))[0][0],)
    with pytest.raises(CaptureError, match=r"fails on the sample: .* takes some in torch\.enable_grad\(\)"):
        capture(make(lambda: Penalized(enables=False)), sample)

    capture(make(lambda: Penalized(enables=True)), sample)
