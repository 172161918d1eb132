"""A block that models with habits of their own are made of, and how such models are trained."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model_cases.cases import Case, Draw
from model_cases.comparison import compare, compare_outputs
from model_cases.habit_blocks import WIDTH, Block, Stack, draw
from model_cases.training import Batches, train_by_oracle, train_plainly, train_staged

__all__ = ["WIDTH", "Block", "Stack", "assert_equals_oracle", "assert_trains", "batches", "build", "sgd", "squares"]

SIZES = ((2, 6), (6, 6), (4, 5), (6, 8))
"""Samples and length: of the sample, and of the steps."""


def assert_trains(
    kind: Callable[[], nn.Module],
    schedule: str = "1f1b-flush",
    stages: int = 3,
    *,
    microbatches: int = 2,
    sizes: Sequence[tuple[int, int]] = SIZES,
    inputs: Draw = draw,
    within: float = 0.0,
    predicts: bool = True,
) -> None:
    """Asserts that a pipeline has the losses, weights and state of a plain loop, or of a delayed one under `2bw`, and
    predicts the same. `within`: to the largest number of a tensor.
    """
    case, batches = Case("", "", kind, inputs, microbatches=microbatches), Batches(sizes, torch.float64)
    expected = train_plainly(case, batches, delayed=schedule == "2bw")
    found = train_staged(case, batches, schedule=schedule, stages=stages, predicts=predicts)
    difference = compare(expected, found)
    assert difference.relative <= within, difference
    if predicts:
        # Kernels may take another path where no gradient is needed.
        assert compare_outputs(expected.prediction, found.prediction).relative <= 1e-12


def assert_equals_oracle(kind: Callable[[], nn.Module], schedule: str, stages: int = 2, **options: Any) -> None:
    """Asserts that a pipeline has the losses and the state of `reference_train`; a plan in `options` goes first."""
    options = options or {"schedule": schedule, "stages": stages}
    case = Case("", "", kind, draw, microbatches=1 if schedule == "pipedream" else 2)
    batches = Batches(SIZES, torch.float64)
    expected, found = train_by_oracle(case, batches, **options), train_staged(case, batches, **options)
    difference = compare(expected, found.saved())
    assert difference.relative == 0, difference


def build(kind: Callable[[], nn.Module]) -> Stack:
    torch.manual_seed(5)
    return Stack(kind).double()


def batches(lengths: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [
        (torch.randn(4, length, WIDTH, dtype=torch.float64, generator=generator), torch.zeros(4)) for length in lengths
    ]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)
