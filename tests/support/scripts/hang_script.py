"""A training script that hangs on purpose: ``hang_script.py SCENARIO CULPRIT SCHEDULE STAGES TIMEOUT_SECONDS``.

The culprit is a rank. What it does in its third step, or around it, is in `Layer.hang` and `train`.
"""

import os
import re
import signal
import sys
import time

import torch
from torch import Tensor, nn

import penstock

MICROBATCHES = 4
SCENARIO, CULPRIT, SCHEDULE, STAGES, TIMEOUT = sys.argv[1], *map(str, sys.argv[2:6])


class Layer(nn.Module):
    """A linear layer that hangs on one rank when it is made to."""

    armed = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if Layer.armed:
            Layer.armed = False
            self.hang()
        return torch.tanh(self.linear(x))

    def hang(self) -> None:
        match SCENARIO:
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep in a forward":
                time.sleep(600)
            case "hold the interpreter":
                re.match("(a+)+$", "a" * 60 + "b")


def train(pipe: penstock.Pipeline) -> None:
    """A few steps. The culprit hangs in the third, before it, or before the first."""
    x = torch.randn(2 * MICROBATCHES, 4)
    culprit = pipe.rank == int(CULPRIT)
    for step in range(4):
        if culprit and (SCENARIO, step) in (("sleep between steps", 2), ("never step", 0)):
            time.sleep(600)
        Layer.armed = culprit and step == 2
        pipe.step(x, x)
        print(step, flush=True)


def main() -> None:
    """Builds a pipeline of as many layers as stages, and trains it."""
    torch.manual_seed(0)
    pipe = penstock.Pipeline(
        nn.Sequential(*(Layer() for _ in range(int(STAGES)))),
        sample=(torch.randn(2, 4),),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        schedule=SCHEDULE,
        stages=int(STAGES),
        microbatches=MICROBATCHES,
        timeout_seconds=float(TIMEOUT),
    )
    train(pipe)


if __name__ == "__main__":
    main()
