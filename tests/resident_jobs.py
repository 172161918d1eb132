"""The memory that a process of a pipeline has resident, for the processes of the pool."""

import ctypes
import gc
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import models
import penstock

__all__ = ["GRADIENT_BYTES", "resident_peak"]

WIDTH = 256
ROWS = 1024
LAYERS = 8
GRADIENT_BYTES = LAYERS // 2 * (WIDTH + 1) * WIDTH * 4
"""Of the weights of a stage."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def resident_peak(schedule: str, microbatches: int) -> int:
    """The most bytes that this process has resident in a step, beyond what it has between steps."""
    # Freed tensors go back to the system at once, so that what is resident is what is alive.
    _keep_freed(2**16)
    try:
        return _resident_peak(schedule, microbatches)
    finally:
        _keep_freed(2**25)


def _keep_freed(most: int) -> None:
    """Has the allocator keep no more than so many freed bytes at the end of its memory, nor so large ones elsewhere."""
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        ctypes.CDLL(None).mallopt(option, most)


def _resident_peak(schedule: str, microbatches: int) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
    x = torch.zeros(ROWS * microbatches, WIDTH)
    plan = penstock.Plan.uniform(2 * LAYERS, 2, schedule=schedule, microbatches=microbatches)
    pipe = penstock.Pipeline(model, (x[:ROWS],), loss_fn=F.mse_loss, optimizer=models.plain, plan=plan)
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
