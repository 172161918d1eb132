"""Prints how much memory a process of a pipeline takes: ``python resident_script.py SCHEDULE MICROBATCHES``.

In bytes: the most that it has resident in a step, beyond what it has between steps; and its gradients of weights.
"""

import ctypes
import gc
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import penstock

WIDTH = 256
ROWS = 1024
LAYERS = 8
GRADIENT_BYTES = LAYERS // 2 * (WIDTH + 1) * WIDTH * 4
"""Of the weights of a stage."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def resident_peak(schedule: str, microbatches: int) -> int:
    """The most bytes that this process has resident in a step, beyond what it has between steps."""
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        # Freed tensors go back to the system at once, so that what is resident is what is alive.
        ctypes.CDLL(None).mallopt(option, 2**16)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
    x = torch.zeros(ROWS * microbatches, WIDTH)
    plan = penstock.Plan.uniform(2 * LAYERS, 2, schedule=schedule, microbatches=microbatches)
    pipe = penstock.Pipeline(
        model,
        (x[:ROWS],),
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        plan=plan,
    )
    for _ in range(2):
        float(pipe.step(x, x).loss)
    pipe.drain()
    gc.collect()
    before = _status("VmRSS")
    # Begins to look for the peak anew.
    Path("/proc/self/clear_refs").write_text("5")
    float(pipe.step(x, x).loss)
    peak = _status("VmHWM") - before
    pipe.close()
    return peak


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


if __name__ == "__main__":
    print(resident_peak(sys.argv[1], int(sys.argv[2])), GRADIENT_BYTES)
