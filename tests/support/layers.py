"""Layers that do what few do: write what they are given, return several tensors, take several."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class InPlace(nn.Module):
    """Writes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5).add_(1.0)
        return self.linear(F.relu_(x))


class Several(nn.Module):
    """Returns a float tensor that needs a gradient, one that needs none, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return y, y.detach().abs(), y.argmax(1)


class Gathering(nn.Module):
    """Takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 6)

    def forward(self, y: Tensor, size: Tensor, index: Tensor) -> Tensor:
        return torch.tanh(y * size) + self.table(index)
