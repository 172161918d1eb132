"""What a first pipeline imports: nothing of PyTorch that takes long and that a plain training does not need."""

import subprocess
import sys

PROGRAM = """
import sys
import torch
from torch import nn
import penstock

class Plain(torch.optim.Optimizer):
    # PyTorch's own import its compiler in their first step.
    def step(self):
        with torch.no_grad():
            for parameter in (p for group in self.param_groups for p in group["params"]):
                parameter -= 0.1 * parameter.grad

def check(when):
    slow = ["torch._dynamo", "torch._inductor", "sympy", "torch.distributed.fsdp", "torch.distributed.tensor"]
    ours = ["planning", "profiling", "simulating", "rendering", "capturing.export", "oracle", "rehearsing", "fleet"]
    found = [name for name in (*slow, *(f"penstock.{name}" for name in ours)) if name in sys.modules]
    assert not found, f"{when} imported {found}"

def build(kind):
    layers, loss_fn = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)]), nn.functional.mse_loss
    return penstock.Pipeline(layers, (torch.ones(8, 8),), loss_fn, lambda p: kind(p, {"lr": 0.1}), stages=2)

penstock.Pipeline
check("import")
build(lambda parameters, defaults: torch.optim.AdamW(parameters, **defaults))
check("a pipeline")
build(Plain).step(torch.ones(8, 8), torch.ones(8, 8))
check("a step")
"""


def test_a_first_pipeline_imports_nothing_that_takes_long() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
