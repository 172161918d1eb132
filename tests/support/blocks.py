"""A block that models with habits of their own are made of."""

from torch import Tensor, nn

__all__ = ["WIDTH", "Block"]

WIDTH = 6


class Block(nn.Module):
    """A block with a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()
