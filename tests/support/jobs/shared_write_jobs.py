"""Trainings in which two layers hold a frozen weight that one of them may write: in this process or in several."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from support.blocks import WIDTH, Block, batches, sgd, squares

__all__ = ["ROUNDS", "SharedWrite", "make_model", "train", "train_these"]

ROUNDS = batches((6, 5, 8, 7))
SharedWrite = tuple[bool, str, int]
"""Whether the weight is written, the schedule, and the number of microbatches."""


class Reading(Block):
    """Adds what the average computes."""

    def __init__(self, average: nn.Linear) -> None:
        super().__init__()
        self.average = average

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(x, self.average.weight.clone())


class Writing(Reading):
    """Moves the average towards its own weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.average.weight.data.mul_(0.9).add_(self.linear.weight.data, alpha=0.1)
        return super().forward(x)


def make_model(writes: bool) -> nn.Sequential:
    torch.manual_seed(5)
    average = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    second = (Writing if writes else Reading)(average)
    return nn.Sequential(Block(), second, Block(), Reading(average), nn.Linear(WIDTH, 3)).double()


def train(run: SharedWrite) -> tuple[list[float], dict[str, Tensor], int]:
    """The losses, the weights of the whole model, and the number of layers."""
    writes, schedule, microbatches = run
    with penstock.Pipeline(
        make_model(writes),
        (ROUNDS[0][0],),
        squares,
        sgd,
        schedule=schedule,
        microbatches=microbatches,
        stages=dist.get_world_size() if dist.is_initialized() else 2,
    ) as pipe:
        losses = [pipe.step(x, target).loss.item() for x, target in ROUNDS]
        return losses, dict(pipe.full_state_dict(rank=None) or {}), pipe.plan.layers


def train_these(runs: Sequence[SharedWrite]) -> list[tuple[list[float], dict[str, Tensor], int]]:
    return [train(run) for run in runs]
