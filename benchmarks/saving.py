"""How long training stands still for a save: `Pipeline.save` that waits, beside ``wait=False``.

    torchrun --nproc-per-node 2 benchmarks/saving.py

Both kinds of saves take turns in one launch, so that they meet the same machine. The state is 200 MB of weights and
AdamW's moments by default. A save that waits stands still for all of its call. Of one that does not, Penstock counts
the call and what updates wait for copies (`stalled_seconds`); the excess of the steps meanwhile over other steps is
shown, too, since copies and writes use the machine. Times are medians of rank 0.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

import penstock
from measurement.reports import Report, option_parser

WIDTH = 1024


def build(megabytes: float, schedule: str) -> tuple[penstock.Pipeline, Callable[[], object]]:
    """A pipeline whose weights and moments take `megabytes`, and a function that makes a step."""
    # Weights and the two moments of AdamW, in float32.
    layers = max(2, round(megabytes * 1e6 / (3 * 4 * WIDTH * (WIDTH + 1))))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))
    x, y = torch.randn(64, WIDTH), torch.randn(64, WIDTH)
    pipe = penstock.Pipeline(
        model,
        sample=(x[:16],),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        schedule=schedule,
        microbatches=4,
        stages=None if dist.is_initialized() else 2,
    )
    return pipe, lambda: float(pipe.step(x, y).loss)


def seconds_of(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Measures and prints."""
    parser = option_parser(__doc__)
    parser.add_argument("--megabytes", type=float, default=200.0, help="weights and moments of all stages")
    parser.add_argument("--schedule", default="1f1b-flush")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="after each save")
    parser.add_argument("--directory", type=Path, help="where to save; by default a temporary directory")
    given = parser.parse_args()

    pipe, step = build(given.megabytes, given.schedule)
    base = given.directory or Path(tempfile.gettempdir())
    run = base / "penstock-saving"
    for _ in range(given.steps):
        step()
    waits, stalls, plain, beside = [], [], [], []
    # The first round is a warm-up: pages of the copies are new.
    for number in range(given.rounds + 1):
        saved = seconds_of(lambda: pipe.save(run, keep=1))
        ordinary = [seconds_of(step) for _ in range(given.steps)]
        save = pipe.save(run, keep=1, wait=False)
        meanwhile = [seconds_of(step) for _ in range(given.steps)]
        save.wait()
        if number:
            waits.append(saved)
            stalls.append(save.stalled_seconds)
            plain.append(sum(ordinary))
            beside.append(sum(meanwhile))
    if pipe.rank == 0:
        wait, stall = median(waits), median(stalls)
        excess = (median(beside) - median(plain)) * 1e3
        Report(given.save).add(
            f"{given.schedule}, {given.megabytes:.0f} MB of state, median of {given.rounds} saves of each kind",
            f"save that waits            {wait * 1e3:9.1f} ms",
            f"save with wait=False       {stall * 1e3:9.1f} ms stands still, {stall / wait:.1%} of it",
            f"the {given.steps} steps after it      {excess:+9.1f} ms against {median(plain) * 1e3:.1f} ms",
        )
        shutil.rmtree(run)
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
