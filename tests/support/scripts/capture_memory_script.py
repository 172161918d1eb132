"""Prints how much memory a capture takes at most, beyond what was resident before, and the bytes of the weights."""

import gc
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import penstock

sys.path.append(str(Path(__file__).absolute().parents[3] / "benchmarks"))
from measurement.resident_memory import forget_peak, resident_bytes, return_what_is_freed

WIDTH = 512
BLOCKS = 96


class Blocks(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def main() -> None:
    return_what_is_freed()
    # What a first capture and a first backward load.
    penstock.capture(Blocks(4, BLOCKS), (torch.ones(2, 4),))
    model = Blocks(WIDTH, BLOCKS)
    gc.collect()
    before = resident_bytes("VmRSS")
    forget_peak()
    penstock.capture(model, (torch.ones(2, WIDTH),))
    print(resident_bytes("VmHWM") - before, sum(each.numel() * each.element_size() for each in model.parameters()))


if __name__ == "__main__":
    main()
