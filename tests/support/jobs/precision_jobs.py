"""Training under autocast: in the test's process, and in those of the pool."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support import models
from support.exports import built_as
from support.training import Outcome, train


class Typed(nn.Module):
    """Its code looks at types: what it computes depends on whether autocast is on where it is captured."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x))
        weights = torch.softmax(y, dim=-1, dtype=torch.float32).to(y.dtype)
        return x + y * weights


class Whole(nn.Module):
    """Blocks and a head, traced."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Typed() for _ in range(7))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Embedded(nn.Module):
    """With what autocast does not cast: a table that is looked up, and one that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 6))
        self.added = nn.Parameter(torch.randn(1, 6))
        self.blocks = nn.ModuleList(Typed() for _ in range(7))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = F.embedding((x[:, :1].abs() * 3).long().clamp(max=4), self.table)[:, 0]
        x = x + found + self.added
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _linear() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(7)), nn.Linear(6, 3))


def _typed() -> nn.Module:
    torch.manual_seed(7)
    return built_as("typed", Whole())


def _embedding() -> nn.Module:
    torch.manual_seed(7)
    return built_as("embedded", Embedded())


CAST_BATCHES = [(x.float(), y) for x, y in models.LAYERED.batches]
CAST = {"linear": _linear, "typed": _typed, "embedded": _embedding}


def cast_options(schedule: str, stages: int, microbatches: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "sample": (models.LAYERED.sample[0].float(),),
        "loss_fn": F.cross_entropy,
        "optimizer": models.momentum,
        "autocast": dtype,
        "schedule": "pipedream" if schedule == "vertical" else schedule,
        "vertical_sync": schedule == "vertical",
        "stages": stages,
        "microbatches": microbatches,
    }


def run_cast(subject: str, schedule: str, stages: int, microbatches: int, recompute: object, **more: Any) -> Outcome:
    """A run under bfloat16."""
    options = cast_options(schedule, stages, microbatches, torch.bfloat16)
    return train(penstock.Pipeline(CAST[subject](), **options, recompute=recompute, **more), CAST_BATCHES)
