"""Counts what a plain training step runs of the library: functions, calls and frames, and no seconds.

    PYTHONPATH=src:tests python -m support.step_counts [schedule ...]
    PYTHONPATH=src:tests torchrun --nproc-per-node 2 -m support.step_counts [schedule ...]

Two stages, or four where a rank has several; four microbatches of four linear layers, SGD and no option, when the pipe
has been full for long. Polls of a ring of shared memory are as many as the other process is slow, and do not count.
"""

import os
import sys
from collections import Counter
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import penstock

WARM_UP, COUNTED, STEPS = 101, 8, 110
"""Steps before those that are counted, and those: among them none that compares whole batches. And all steps."""
HOME = os.path.dirname(penstock.__file__)
SCHEDULES = ("1f1b-flush", "2bw", "interleaved", "zb-v")


class StepCounts(NamedTuple):
    functions: int
    calls: float
    """In a step."""
    above_block: int
    """Frames of the library above the forward of a block."""
    above_step: int
    """Frames of the library above ``optimizer.step``."""


class Block(nn.Linear):
    frames = 0

    def forward(self, x: Tensor) -> Tensor:
        Block.frames = _frames_above()
        return super().forward(x)


class Descent(torch.optim.SGD):
    frames = 0

    def step(self, closure: Any = None) -> Any:
        Descent.frames = _frames_above()
        return super().step(closure)


def _frames_above() -> int:
    frame: FrameType | None = sys._getframe(2)
    found = 0
    while frame is not None:
        found += frame.f_code.co_filename.startswith(HOME)
        frame = frame.f_back
    return found


def count_step(schedule: str, processes: int = 1) -> StepCounts:
    """The counts of this process, which is one of `processes`."""
    torch.manual_seed(0)
    stages = 4 if schedule not in ("1f1b-flush", "2bw") else 2 if processes == 1 else None
    with penstock.Pipeline(
        nn.Sequential(*[Block(32, 32) for _ in range(4)]),
        sample=(torch.randn(4, 32),),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: Descent(parameters, lr=0.01),
        microbatches=4,
        schedule=schedule,
        stages=stages,
    ) as pipe:
        x, y = torch.randn(16, 32), torch.randn(16, 32)
        for _ in range(WARM_UP):
            pipe.step(x, y)
        calls: Counter[tuple[str, int, str]] = Counter()

        def note(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(HOME) and code.co_name != "filled":
                calls[code.co_filename, code.co_firstlineno, code.co_qualname] += 1

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            for _ in range(COUNTED):
                pipe.step(x, y)
        finally:
            sys.setprofile(before)
        for _ in range(STEPS - WARM_UP - COUNTED):
            pipe.step(x, y)
        return StepCounts(len(calls), sum(calls.values()) / COUNTED, Block.frames, Descent.frames)


if __name__ == "__main__":
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    for name in sys.argv[1:] or SCHEDULES:
        found = count_step(name, processes)
        if os.environ.get("RANK", "0") == "0":
            print(f"{name:12s} {found.functions} functions, {found.calls:.0f} calls, frames above a block "
                  f"{found.above_block}, above optimizer.step {found.above_step}")  # fmt: skip
