"""A block that models with habits of their own are made of, and how such models are trained."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["WIDTH", "Block", "Model", "batches", "build", "sgd", "squares", "train_plainly"]

WIDTH = 6


class Block(nn.Module):
    """A block with a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Model(nn.Module):
    """Blocks of one kind, and a connection over all of them, which only a trace of the model finds."""

    def __init__(self, kind: Callable[[], nn.Module], blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        early = x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x + early)


def build(kind: Callable[[], nn.Module]) -> Model:
    torch.manual_seed(5)
    return Model(kind).double()


def batches(lengths: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [
        (torch.randn(4, length, WIDTH, dtype=torch.float64, generator=generator), torch.zeros(4)) for length in lengths
    ]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def train_plainly(model: Model, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    optimizer, losses = sgd(list(model.parameters())), []
    for x, target in data:
        loss = squares(model(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
