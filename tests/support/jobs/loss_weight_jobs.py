"""Losses that are means over tokens, in ragged batches: in the test's process, and in those of the pool."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support import models
from support.training import Outcome, train

IGNORED = -100


def build() -> nn.Module:
    """A model of sequences."""
    torch.manual_seed(7)
    blocks = (nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6))
    return nn.Sequential(nn.Embedding(11, 6), *blocks, nn.Linear(6, 11)).double()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the tokens that count; 0 where none does."""
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (target != IGNORED).sum().clamp(min=1)


def tokens(target: Tensor) -> Tensor:
    """How many count."""
    return (target != IGNORED).sum()


def _batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    text = torch.randint(11, (12, 6), generator=generator)
    lengths = torch.randint(1, 6, (12, 1), generator=generator)
    lengths[4:6] = 0  # whole samples may be padding, and whole microbatches
    target = text.roll(-1, 1).masked_fill(torch.arange(6) >= lengths, IGNORED)
    return text, target


BATCHES = [_batch(torch.Generator().manual_seed(seed)) for seed in range(4)]


def weighted_options(schedule: str, stages: int, microbatches: int, **more: Any) -> dict[str, Any]:
    return {
        "sample": (BATCHES[0][0][:2],),
        "loss_fn": loss_fn,
        "loss_weight": tokens,
        "optimizer": models.momentum,
        "schedule": schedule,
        "stages": stages,
        "microbatches": microbatches,
        **more,
    }


def replicate(options: dict[str, Any], layers: int, split: bool) -> dict[str, Any]:
    """`options` with a plan in which the second of two stages has two replicas."""
    plan = penstock.Plan.uniform(layers, 2, schedule=options["schedule"], microbatches=3)
    stages = (replace(plan.stages[0], ranks=(0,)), replace(plan.stages[1], ranks=(1, 2)))
    plan = replace(plan, stages=stages, routing="split" if split else "round-robin")
    return {**options, "schedule": None, "stages": None, "microbatches": None, "plan": plan}


def run_weighted(**options: Any) -> Outcome:
    return train(penstock.Pipeline(build(), **options), BATCHES, evaluates=True)
