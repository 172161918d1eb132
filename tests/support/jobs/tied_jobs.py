"""Runs of a model in which layers share weights: by the pipeline (here or in many processes) and by the oracle."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support import models
from support.training import Outcome, train, train_by_oracle

LAYERS, WIDTH = 8, 6


def _make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(20, WIDTH, dtype=torch.float64, generator=generator),
            torch.randint(WIDTH, (20,), generator=generator),
        )
        for _ in range(6)
    ]


BATCHES = _make_batches()


class Curved(nn.Module):
    """A linear layer and a tanh, which may make no gradient of its weight for some data."""

    def __init__(self, detaching: bool = False) -> None:
        super().__init__()
        self.linear, self.detaching = nn.Linear(WIDTH, WIDTH), detaching

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if self.detaching and x.sum() > 0:
            weight = weight.detach()
        return torch.tanh(F.linear(x, weight, self.linear.bias))


def build_tied(shared: tuple[tuple[int, ...], ...], detaching: tuple[int, ...] = ()) -> nn.Sequential:
    """Layers, each with a bias of its own; those of a group in `shared` have one weight."""
    torch.manual_seed(3)
    layers = [Curved(number in detaching) for number in range(LAYERS)]
    for first, *others in shared:
        for other in others:
            layers[other].linear.weight = layers[first].linear.weight
    return nn.Sequential(*layers).double()


@dataclass(frozen=True)
class TiedRun:
    """A run of `2bw`, unless it `flushes`. `replicas` of each stage; layers are split evenly.

    `shared`: groups of layers. `clips`: gradients are clipped by the norm over all stages, and losses are scaled.
    """

    shared: tuple[tuple[int, ...], ...]
    replicas: tuple[int, ...]
    microbatches: int
    split: bool = False
    drain_after: tuple[int, ...] = ()
    clips: bool = False
    flushes: bool = False

    @property
    def options(self) -> dict[str, Any]:
        count = len(self.replicas)
        bounds = [LAYERS * stage // count for stage in range(count + 1)]
        ranks = [tuple(range(*span)) for span in pairwise(accumulate(self.replicas, initial=0))]
        stages = tuple(penstock.Stage(*span, held) for span, held in zip(pairwise(bounds), ranks, strict=True))
        routing = "split" if self.split else "round-robin"
        schedule = "1f1b-flush" if self.flushes else "2bw"
        return {
            "sample": (BATCHES[0][0][:4],),
            "loss_fn": F.cross_entropy,
            "optimizer": models.adamw,
            "plan": penstock.Plan(stages, schedule, self.microbatches, routing=routing),
            **({"clip_grad_norm": 0.05, "loss_scale": 1024.0} if self.clips else {}),
        }


def run_here(run: TiedRun) -> Outcome:
    """By `Pipeline`: all ranks, or this process's part of them."""
    return train(penstock.Pipeline(build_tied(run.shared), **run.options), BATCHES, run.drain_after)


def run_these(runs: list[TiedRun]) -> list[Outcome]:
    """Several runs, one after the other, in the present process group."""
    return [run_here(run) for run in runs]


def run_reference(run: TiedRun) -> Outcome:
    return train_by_oracle(build_tied(run.shared), BATCHES, drain_after=run.drain_after, **run.options)
