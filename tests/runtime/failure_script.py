"""A training script that goes wrong on purpose: ``python failure_script.py SCENARIO FAILING_RANK``."""

import math
import os
import signal
import sys
import time
from typing import ClassVar

import torch
from torch import Tensor, nn

import penstock


class Layer(nn.Module):
    """A linear layer that fails at its third forward if it is told to."""

    forwards_left: ClassVar[float] = math.inf
    """Before the failing one."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            Layer.forwards_left -= 1
            if Layer.forwards_left < 0:
                self.fail()
        return torch.tanh(self.linear(x))

    def fail(self) -> None:
        """What the scenario asks for."""
        match sys.argv[1]:
            case "raise" | "catch":
                raise ValueError("the layer is broken")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    """Trains a few steps; the rank of the failing layer goes wrong in the second."""
    scenario, failing = sys.argv[1], int(sys.argv[2])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(fails=stage == failing) for stage in range(ranks)))
    pipe = penstock.Pipeline(
        model,
        sample=(torch.randn(2, 4),),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        schedule=sys.argv[3],
        microbatches=4,
        timeout_seconds=4.0 if scenario == "freeze" else 60.0,
    )
    Layer.forwards_left = 6
    x = torch.randn(8, 4)
    for step in range(5):
        if step == 2 and rank == failing:
            if scenario == "outside":
                raise OSError("the data set is gone")
            if scenario == "leave":
                return
        try:
            print(float(pipe.step(x, x).loss), flush=True)
        except ValueError:
            if scenario == "catch":
                # The process lives on: its peers must end all the same.
                time.sleep(30)
            raise


if __name__ == "__main__":
    main()
