"""Models whose values are read far behind the layer that makes them, and their training: here, and in the pool."""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support import models
from support.exports import built_as
from support.live_tensors import count_at_rest, forget_what_is_there
from support.training import Outcome, train, train_by_oracle

WIDTH = 6
SAMPLES = 3000
"""The samples of the batch: each of its values is then worth a message of its own."""
REACHING = ((), (0,), (), (0,), (2,), (0, 0), (1, 3))
"""Of a web of eight blocks: that of the first goes from reader to reader, 0, 1, 2, 4, 6; that of the second 1, 2, 7."""


class Web(nn.Module):
    """Blocks that read what any earlier ones made, twice each time, so that the order of additions shows in the bits.

    `reads[i]`: the earlier blocks that block i + 1 reads beside the last one. Every second block also reads a mask,
    which has no gradient, of what the first one made.
    """

    def __init__(self, reads: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.reads = reads
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in reads)

    def forward(self, x: Tensor) -> Tensor:
        made = [self.first(x)]
        mask = made[0] > 0
        for index, (block, earlier) in enumerate(zip(self.blocks, self.reads, strict=True)):
            y = block(made[-1])
            for other in earlier:
                y = y * torch.sigmoid(made[other]) + 0.1 * made[other]
            made.append(torch.where(mask, y, 0.9 * y) if index % 2 else y)
        return made[-1]


def build_web(reads: tuple[tuple[int, ...], ...]) -> Web:
    torch.manual_seed(5)
    return built_as(f"web of {reads}", Web(reads).double())  # type: ignore[return-value]


@dataclass(frozen=True)
class Run:
    """A short training; `reads`: of a `Web`, or None for the U-Net, of eight layers."""

    plan: penstock.Plan
    reads: tuple[tuple[int, ...], ...] | None = None
    recompute: bool = False
    compile: bool = False
    evaluates: bool = False

    def build(self) -> nn.Module:
        if self.reads is not None:
            return build_web(self.reads)
        torch.manual_seed(5)
        return built_as("U-Net past stages", models.UNet().double())

    @property
    def sample(self) -> tuple[Tensor, ...]:
        """Inputs of a large microbatch."""
        return (torch.zeros(self._shape(SAMPLES if self.reads is not None else 64), dtype=torch.float64),)

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(9)
        shape = self._shape(2 * self.plan.microbatches)
        found = []
        for _ in range(3):
            x = torch.randn(shape, dtype=torch.float64, generator=generator)
            y = torch.randn(shape if self.reads is not None else (shape[0], 8, 8, 5), dtype=torch.float64)
            found.append((x, torch.zeros_like(y) + x.mean()))
        return found

    def _shape(self, samples: int) -> tuple[int, ...]:
        return (samples, WIDTH) if self.reads is not None else (samples, 3, 8, 8)

    def pipeline(self) -> penstock.Pipeline:
        options = {"recompute": True} if self.recompute else {}
        return penstock.Pipeline(
            self.build(),
            self.sample,
            F.mse_loss,
            models.adamw,
            plan=self.plan,
            compile={"backend": "eager"} if self.compile else False,
            **options,
        )


def run_pipeline(run: Run) -> Outcome:
    """Every loss, the weights of this process, and perhaps the loss of an evaluation."""
    pipe = run.pipeline()
    assert pipe.schedule.skips, "nothing passes a stage"
    return train(pipe, run.batches, evaluates=run.evaluates)


@cache
def run_reference(run: Run) -> Outcome:
    return train_by_oracle(
        run.build(), run.batches, sample=run.sample, loss_fn=F.mse_loss, optimizer=models.adamw, plan=run.plan
    )


def count_tensors(run: Run, steps: int = 5) -> list[int]:
    pipe, counts = run.pipeline(), []
    forget_what_is_there()
    for step in range(steps):
        x, y = run.batches[step % 3]
        float(pipe.step(x, y).loss)
        counts.append(count_at_rest(counts[2:]))
    pipe.drain()
    pipe.close()
    return counts
