"""Jobs for the tests of the default cut."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from support import models

__all__ = ["cut_by_own_data", "measure_and_cut"]


class Repeated(nn.Module):
    """Works as often as its first number says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.detach().flatten()[0].abs()) + 1):
            x = x + 0 * self.linear(x)
        return x


def _cut(x: Tensor, balance: Any) -> penstock.Plan:
    torch.manual_seed(0)
    layers = [Repeated(), *(nn.Linear(16, 16) for _ in range(4))]
    with penstock.Pipeline(layers, (x,), nn.functional.mse_loss, models.plain, balance=balance) as pipe:
        return pipe.plan


def cut_by_own_data() -> penstock.Plan:
    """The plan of a model that works more on the sample of rank 1 than on that of rank 0."""
    return _cut(torch.full((2, 16), 60.0 * dist.get_rank()), "work")


def measure_and_cut() -> penstock.Plan:
    """The plan by measured seconds."""
    return _cut(torch.ones(2, 16), "measured")
