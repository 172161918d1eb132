"""Which modules are blocks."""

import torch
from torch import Tensor, nn

from penstock.capturing import capture


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.output = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.softmax(self.scores(x), -1))  # type: ignore[no-any-return]


class ListsInAList(nn.Module):
    """Keeps each block as a list of modules, which its loop takes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(4), Attention(), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))])
            for _ in range(3)
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for norm, attention, perceptron in self.layers:  # type: ignore[misc]
            x = x + attention(norm(x))
            x = x + perceptron(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_lists_in_a_list_are_taken_apart() -> None:
    layers = [layer.name for layer in capture(ListsInAList(), (torch.ones(2, 5, 4),)).layers]

    assert [name for name in layers if name.endswith((".1", ".2"))] == [
        f"layers.{index}.{part}" for index in range(3) for part in (1, 2)
    ]
