"""Models drawn at random out of habits that one by one are easy: state, sharing, views, writes in place, hooks, modes.

What is wrong with a combination of them shows in a few of hundreds, so each seed is a model of its own.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["WIDTH", "Averaging", "Counting", "RandomModel", "as_module", "draw_model"]

WIDTH = 6


class Counting(nn.Module):
    """Divides by the number of its calls in training, which it keeps in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.linear(x) / (1 + 0.1 * self.calls)


class Averaging(nn.Module):
    """Assigns a new tensor to a buffer."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y - self.average


class WritesInput(nn.Module):
    """Writes what it is given in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x *= 0.9
        return x * self.weight


class WritesResult(nn.Module):
    """Writes its own result in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y.mul_(0.5).add_(x)


class OtherInEvaluation(nn.Module):
    """Computes something else in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if self.training else 0.5 * y


class PartlyUsed(nn.Module):
    """Has a layer without gradients, and one that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.fixed, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.fixed(x)
        result: Tensor = self.used(x) + shift
        return result


def _hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(lambda module, args, output: 1.5 * output)
    layer.register_forward_pre_hook(lambda module, args: (0.7 * args[0],))
    layer.weight.register_hook(lambda gradient: 0.5 * gradient)
    return layer


BLOCKS: Sequence[Callable[[], nn.Module]] = (
    Counting,
    Averaging,
    WritesInput,
    WritesResult,
    OtherInEvaluation,
    PartlyUsed,
    _hooked,
    nn.Identity,
    nn.Flatten,
    nn.Tanh,
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.LayerNorm(WIDTH),
    lambda: nn.BatchNorm1d(WIDTH),
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)),
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
)


class RandomModel(nn.Module):
    """Calls `blocks` one after the other, with code of its own between them, one letter of `between` each."""

    def __init__(self, blocks: Sequence[nn.Module], between: str) -> None:
        super().__init__()
        self.blocks, self.between = nn.ModuleList(blocks), between
        self.scale, self.norm = nn.Parameter(torch.ones(WIDTH)), nn.LayerNorm(WIDTH)
        self.register_buffer("table", torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for block, kind in zip(self.blocks, self.between, strict=True):
            y = block(x)
            match kind:
                case "r":
                    y = y + x
                case "f":
                    y = y + first
                case "s":
                    y = y * self.scale + self.table
                case "n":
                    y = self.norm(y)
                case "v":
                    y = y.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(y.shape)
                case "w":
                    y = y.clone()
                    y[:, ::2] += 1
                case "m":
                    y = y if self.training else 0.5 * y
                case "g":
                    with torch.no_grad():
                        shift = 0.3 * y
                    y = y + shift
                case "d":
                    y = torch.where(y > 0, y, F.dropout(y, 0.0, self.training))
            x = y
        result: Tensor = self.head(x)
        return result


def draw_model(seed: int) -> nn.Module | list[nn.Module]:
    """A model, the same for one seed: a module with code of its own, an `nn.Sequential`, or a list of layers."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    blocks: list[nn.Module] = []
    for _ in range(draw.randint(4, 8)):
        blocks.append(draw.choice(blocks) if blocks and draw.random() < 0.2 else draw.choice(BLOCKS)().double())
    linear = [block for block in dict.fromkeys(blocks) if type(block) is nn.Linear and not block._forward_hooks]
    if len(linear) > 1 and draw.random() < 0.5:
        linear[1].weight = linear[0].weight
    match draw.choice(("module", "module", "sequential", "list")):
        case "module":
            return RandomModel(blocks, "".join(draw.choices("-rfsnvwmgd", k=len(blocks)))).double()
        case "sequential":
            return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH).double())
    return [*blocks, nn.Linear(WIDTH, WIDTH).double()]


def as_module(model: Any) -> nn.Module:
    """`model`, of which a list is an `nn.Sequential`, with the same names."""
    return nn.Sequential(*model) if isinstance(model, list) else model
