"""Small models for the tests, each with a sample, batches and a loss, in float64.

They are ordinary modules, written without Penstock in mind.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LAYERED", "SUBJECTS", "Subject", "adamw", "momentum", "plain"]


class Perceptron(nn.Module):
    """A chain of blocks."""

    def __init__(self, width: int = 6, depth: int = 7) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Residual(nn.Module):
    """A block with BatchNorm, dropout and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.norm(self.linear(x))))


class Normalized(nn.Module):
    """BatchNorm and dropout in every block."""

    def __init__(self, width: int = 6, depth: int = 7) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(depth)))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class Skipping(nn.Module):
    """The first block's output is used by the fourth and the last: skip connections across two cuts and more."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.third = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.fourth = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh())
        self.fifth = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.sixth = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.seventh = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh())
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        early = self.first(x)
        middle = self.fourth(torch.cat([self.third(self.second(early)), early], dim=-1))
        late = self.sixth(self.fifth(middle))
        return self.head(self.seventh(torch.cat([late, early], dim=-1)))


class Centred(nn.Module):
    """A block with dropout, and a running mean that decides what it computes in training: a buffer that matters."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.training:
            self.mean.lerp_(y.detach().mean(0), 0.1)
        return x + self.dropout(y - self.mean)


def layered() -> nn.Sequential:
    """Layers in a row, which capture need not trace."""
    return nn.Sequential(*(Centred() for _ in range(7)), nn.Linear(6, 3))


@dataclass(frozen=True)
class Subject:
    """A model and what it takes to train it."""

    build: Callable[[], nn.Module]
    sample: tuple[Any, ...]
    batches: tuple[tuple[Tensor, Tensor], ...]
    loss_fn: Callable[[Any, Any], Tensor] = F.cross_entropy


def _subject(kind: Callable[[], nn.Module], minibatches: int = 5, samples: int = 16) -> Subject:
    def build() -> nn.Module:
        torch.manual_seed(7)
        return kind().double()

    generator = torch.Generator().manual_seed(11)
    batches = tuple(
        (
            torch.randn(samples, 6, dtype=torch.float64, generator=generator),
            torch.randint(3, (samples,), generator=generator),
        )
        for _ in range(minibatches)
    )
    return Subject(build, (batches[0][0][:3],), batches)


SUBJECTS = {"perceptron": _subject(Perceptron), "normalized": _subject(Normalized), "skipping": _subject(Skipping)}
LAYERED = _subject(layered)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def plain(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD without momentum."""
    return torch.optim.SGD(parameters, lr=0.05)
