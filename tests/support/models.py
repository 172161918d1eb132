"""Small models for the tests, each with a sample, batches and a loss, in float64.

They are ordinary modules, written without Penstock in mind.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.exports import built_as


class InARow(nn.Module):
    """Modules one after the other. A model of this class is traced, since it is no ``nn.Sequential``."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Blocks(nn.Module):
    """Blocks of a kind in a row, which are found in a list."""

    def __init__(self, kind: Callable[[], nn.Module], count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


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
    def __init__(self, width: int = 6, depth: int = 7) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(depth)))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class Routed(nn.Module):
    """A block of what only the model's own Python can do: it sends each sample to one of its experts, in a loop, keeps
    a list and a counter, assigns a buffer anew, and has hooks.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.calls = 0
        self.seen: list[int] = []
        self.register_buffer("load", torch.zeros(2))
        self.experts[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.register_full_backward_hook(halve_large_gradients)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        self.calls += 1
        chosen = self.router(x).argmax(-1)
        self.seen.append(int(chosen.sum()))
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = chosen == index
            if rows.any():
                out[rows] = expert(x[rows])
        self.load = 0.9 * self.load + torch.bincount(chosen, minlength=2).to(self.load)
        warm_up = scale * min(self.calls, 5) / 5 + 0.01 * (self.seen[-1] % 3)
        return x + warm_up * out.tanh(), self.load.sum().expand(len(x), 1)


def halve_large_gradients(
    module: nn.Module, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """A backward hook whose effect depends on the gradients."""
    return tuple(None if each is None else torch.where(each.abs() > 0.01, each / 2, each) for each in inputs)


class Stateful(nn.Module):
    """Blocks with state, hooks and control flow of their own, and a connection over all of them."""

    def __init__(self, width: int = 6, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Routed(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        early = x = self.embed(x)
        for block in self.blocks:
            x, load = block(x, scale=0.5)
            x = x + 0.001 * load
        return self.head(x + early)


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


class Level(nn.Module):
    """One level down or up of a U-Net: a convolution with normalization, at another resolution."""

    def __init__(self, inputs: int, outputs: int, upward: bool) -> None:
        super().__init__()
        kind = nn.ConvTranspose2d if upward else nn.Conv2d
        self.convolution = kind(inputs, outputs, 2, stride=2)
        self.norm = nn.GroupNorm(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.convolution(x)))


class UNet(nn.Module):
    """Every level up reads what its level down made: skip connections across all stages."""

    def __init__(self, width: int = 4, levels: int = 3, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Level(width, width, upward=False) for _ in range(levels))
        self.up = nn.ModuleList(Level(width * (1 + (level > 0)), width, upward=True) for level in range(levels))
        self.head = nn.Conv2d(2 * width, classes, 1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(samples, 3, height, width) to classes behind the pixels: (samples, height, width, classes)."""
        x, skips = self.stem(pixel_values), []
        for level in self.down:
            skips.append(x)
            x = level(x)
        for level, skip in zip(self.up, reversed(skips), strict=True):
            x = torch.cat([level(x), skip], dim=1)
        return self.head(x).movedim(1, -1)


class Recurrent(nn.Module):
    """A language model of LSTMs with dropout between them."""

    def __init__(self, vocabulary: int = 50, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(depth))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = self.dropout(layer(x)[0])
        return self.head(x)


def layered() -> nn.Sequential:
    """Layers in a row, which capture need not trace."""
    return nn.Sequential(*(Centred() for _ in range(7)), nn.Linear(6, 3))


@dataclass(frozen=True)
class Subject:
    build: Callable[[], nn.Module]
    sample: tuple[Any, ...]
    batches: tuple[tuple[Tensor, Tensor], ...]
    loss_fn: Callable[[Any, Any], Tensor] = F.cross_entropy


def _subject(kind: Callable[[], nn.Module], minibatches: int = 4, samples: int = 16) -> Subject:
    def build() -> nn.Module:
        torch.manual_seed(7)
        return built_as(kind.__name__, kind().double())

    generator = torch.Generator().manual_seed(11)
    batches = tuple(
        (
            torch.randn(samples, 6, dtype=torch.float64, generator=generator),
            torch.randint(3, (samples,), generator=generator),
        )
        for _ in range(minibatches)
    )
    return Subject(build, (batches[0][0][:3],), batches)


SUBJECTS = {
    "perceptron": _subject(Perceptron),
    "normalized": _subject(Normalized),
    "skipping": _subject(Skipping),
    "stateful": _subject(Stateful),
}
LAYERED = _subject(layered)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def plain(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)
