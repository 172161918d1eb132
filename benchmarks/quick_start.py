"""The processor seconds that a first pipeline takes beyond ``import torch``.

    python benchmarks/quick_start.py

The least of five processes: `penstock.Pipeline` is imported; eight Linear layers become a pipeline; that makes its
first step. In that, the first step of an optimizer of PyTorch's imports PyTorch's compiler.
"""

import subprocess
import sys

PROGRAM = """
import time, torch
from torch import nn
times = [time.process_time()]
import penstock
penstock.Pipeline
times.append(time.process_time())
layers, loss_fn = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)]), nn.functional.mse_loss
pipe = penstock.Pipeline(layers, (torch.ones(8, 8),), loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), stages=2)
times.append(time.process_time())
pipe.step(torch.ones(8, 8), torch.ones(8, 8))
times.append(time.process_time())
print(*[after - before for before, after in zip(times, times[1:])])
"""

if __name__ == "__main__":
    command = [sys.executable, "-c", PROGRAM]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(5)]
    for number, part in enumerate(("import", "pipeline", "step")):
        print(f"{part:<8} {min(float(run[number]) for run in runs):.3f} s")
