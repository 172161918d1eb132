"""A block that models with habits of their own are made of, and how such models are trained."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model_cases.habit_blocks import WIDTH, Block, Stack

__all__ = ["WIDTH", "Block", "Stack", "batches", "build", "sgd", "squares", "train_plainly"]


def build(kind: Callable[[], nn.Module]) -> Stack:
    torch.manual_seed(5)
    return Stack(kind).double()


def batches(lengths: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [
        (torch.randn(4, length, WIDTH, dtype=torch.float64, generator=generator), torch.zeros(4)) for length in lengths
    ]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def train_plainly(model: Stack, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    optimizer, losses = sgd(list(model.parameters())), []
    for x, target in data:
        loss = squares(model(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
