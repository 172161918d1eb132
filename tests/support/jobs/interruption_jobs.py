"""Jobs in which one of several processes fails, and all go on."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support import models

__all__ = ["fail_and_build_anew", "steps_of"]


class _Fragile(nn.Module):
    """A layer that fails in evaluations of one rank, if that is asked for."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if _Fragile.fails and not torch.is_grad_enabled():
            raise ValueError("the layer is broken")
        return torch.tanh(self.linear(x))


def build() -> penstock.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Fragile() for _ in range(4)))
    x = torch.randn(2, 6, dtype=torch.float64)
    return penstock.Pipeline(
        model, sample=(x,), loss_fn=F.mse_loss, optimizer=models.momentum, stages=2, microbatches=2, schedule="2bw"
    )


def steps_of(pipe: penstock.Pipeline, steps: range) -> list[float]:
    """The losses of some steps."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, 4, 6, dtype=torch.float64, generator=generator)
        losses.append(float(pipe.step(x, y).loss))
    return losses


def fail_and_build_anew(directory: Path, failing: int) -> tuple[list[float], str, str]:
    """Trains, fails in a prediction of one rank, and goes on with a new pipeline in the same processes. Returns the
    losses, the first error of this rank, and what the failed pipeline says then.
    """
    pipe = build()
    x = torch.zeros(4, 6, dtype=torch.float64)
    losses = steps_of(pipe, range(2))
    pipe.predict(x)
    pipe.save(directory)
    _Fragile.fails = pipe.rank == failing
    first = refusal = ""
    try:
        pipe.predict(x)
    except (ValueError, penstock.TransportError) as error:
        first = f"{type(error).__name__}: {error}"
    try:
        pipe.predict(x)
    except penstock.PenstockError as error:
        refusal = str(error)
    _Fragile.fails = False
    pipe.close()
    pipe = build()
    pipe.load(directory)
    losses += steps_of(pipe, range(2, 4))
    pipe.close()
    return losses, first, refusal
