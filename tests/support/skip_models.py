"""Models whose values are read far behind the layer that makes them."""

import torch
from torch import Tensor, nn

from support.exports import built_as

WIDTH = 6
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
