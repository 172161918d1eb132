"""A training script that goes wrong on purpose: ``failure_script.py SCENARIO FAILING_RANK SCHEDULE REPLICAS DEVICE``.

REPLICAS of the stages, such as 2-1; of one layer each. DEVICE "tardy" is a CPU that sends as GPUs do by NCCL; "own" is
a GPU for each process.
"""

import math
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

import penstock
from penstock.testing import faults

MICROBATCHES = 6


class Layer(nn.Module):
    """A linear layer that can fail at its third forward."""

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
        if sys.argv[1].removeprefix("with ") in ("raise", "catch"):
            raise ValueError("the layer is broken")


def plan_of(counts: list[int], schedule: str) -> penstock.Plan:
    """One layer for each stage, on this number of ranks."""
    ends = list(accumulate(counts, initial=0))
    stages = (penstock.Stage(s, s + 1, tuple(range(*span))) for s, span in enumerate(pairwise(ends)))
    return penstock.Plan(tuple(stages), schedule, MICROBATCHES)


def warm_up(device: torch.device) -> None:
    """What a GPU loads for its first step may take longer than the ranks wait for each other in some scenarios."""
    if device.type != "cuda":
        return
    layer = Layer(fails=False).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(2, 4, device=device)
    nn.functional.mse_loss(layer(x), x).backward()
    optimizer.step()
    torch.cuda.synchronize(device)


def main() -> None:
    """Trains a few steps; the rank of the failing layer goes wrong in the second."""
    scenario, failing = sys.argv[1], int(sys.argv[2])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    counts = [int(count) for count in sys.argv[4].split("-")]
    assert ranks == sum(counts)
    device = torch.device({"tardy": "cpu", "own": f"cuda:{rank}"}.get(sys.argv[5], sys.argv[5]))
    warm_up(device)
    model = nn.Sequential(*(Layer(fails=rank == failing) for _ in counts)).to(device)
    pipe = penstock.Pipeline(
        model,
        sample=(torch.randn(2, 4, device=device),),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        plan=plan_of(counts, sys.argv[3]),
        timeout_seconds=4.0 if scenario == "freeze" else 60.0,
    )
    verb = {"kill": "kill", "freeze": "stop"}.get(scenario)
    given = faults.parse_faults(f"{verb} rank={failing} step=1 action=F3" if verb else "")
    # Under "with", the block's end closes the pipeline before the exception reaches the top.
    with faults.inject(given), pipe if scenario.startswith("with") else nullcontext():
        train(pipe, scenario.removeprefix("with "), failing, counts, device)


def train(pipe: penstock.Pipeline, scenario: str, failing: int, counts: list[int], device: torch.device) -> None:
    """Five steps, of which the failing rank does not do all."""
    replicas = next(count for count, last in zip(counts, accumulate(counts), strict=True) if failing < last)
    # In the second step: what the failing rank forwards in one and a half.
    Layer.forwards_left = 3 * MICROBATCHES // (2 * replicas)
    x = torch.randn(2 * MICROBATCHES, 4, device=device)
    for step in range(5):
        if step == 2 and pipe.rank == failing:
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


def over_tardy_communicators() -> AbstractContextManager[None]:
    """A context in which the CPU sends as GPUs do by NCCL."""
    # The modules of the tests lie one folder up.
    sys.path.append(str(Path(__file__).absolute().parents[2]))
    from support.simulated.stream_races import RacingDevice, on_streams

    os.environ["PENSTOCK_SHARED_MEMORY"] = "0"
    return on_streams(RacingDevice(tardy=True))


if __name__ == "__main__":
    tardy = sys.argv[5] == "tardy"
    with over_tardy_communicators() if tardy else nullcontext():
        main()
