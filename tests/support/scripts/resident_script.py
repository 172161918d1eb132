"""Prints how much memory a process of a pipeline takes: ``python resident_script.py SCHEDULE MICROBATCHES``.

In bytes: the most that it has resident in a step, beyond what it has between steps; and its gradients of weights.
"""

import gc
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import penstock

sys.path.append(str(Path(__file__).absolute().parents[3] / "benchmarks"))
from measurement.resident_memory import forget_peak, resident_bytes, return_what_is_freed

WIDTH = 256
ROWS = 1024
LAYERS = 8
GRADIENT_BYTES = LAYERS // 2 * (WIDTH + 1) * WIDTH * 4
"""Of the weights of a stage."""


def resident_peak(schedule: str, microbatches: int) -> int:
    """The most bytes that this process has resident in a step, beyond what it has between steps."""
    return_what_is_freed()
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
    before = resident_bytes("VmRSS")
    forget_peak()
    float(pipe.step(x, x).loss)
    peak = resident_bytes("VmHWM") - before
    pipe.close()
    return peak


if __name__ == "__main__":
    print(resident_peak(sys.argv[1], int(sys.argv[2])), GRADIENT_BYTES)
