"""Prints how much memory a capture takes at most, beyond what was resident before, and the bytes of the weights."""

import ctypes
import gc
from pathlib import Path

import torch
from torch import Tensor, nn

import penstock

WIDTH = 512
BLOCKS = 96
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class Blocks(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def main() -> None:
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        # Freed tensors go back to the system at once, so that what is resident is what is alive.
        ctypes.CDLL(None).mallopt(option, 2**16)
    # What a first capture and a first backward load.
    penstock.capture(Blocks(4, BLOCKS), (torch.ones(2, 4),))
    model = Blocks(WIDTH, BLOCKS)
    gc.collect()
    before = _status("VmRSS")
    # Begins to look for the peak anew.
    Path("/proc/self/clear_refs").write_text("5")
    penstock.capture(model, (torch.ones(2, WIDTH),))
    print(_status("VmHWM") - before, sum(each.numel() * each.element_size() for each in model.parameters()))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


if __name__ == "__main__":
    main()
