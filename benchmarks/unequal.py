"""Plans around a slow device: two processes, of which one is held to half its speed.

    nice -n -20 python benchmarks/unequal.py --save benchmarks/results/unequal.txt

A process that is stopped and continued in turns (SIGSTOP, SIGCONT) for equal times does half the work in a time. It
stands for a device of half the speed. Two processes train a chain of equal blocks, one core each. ``plan="auto"``
measures the layers on rank 0 and the speeds of both, and plans; the contender has equal stages under the same schedule
with the same microbatches. The two take turns, round by round. Prints the samples per second of both, what the
simulator predicted, and the spread over the rounds.
"""

import json
import os
import signal
import statistics
import time
from multiprocessing import Event, Process
from multiprocessing.synchronize import Event as Flag
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from contenders.jobs import sgd
from measurement.launches import launch_and_read
from measurement.reports import Report, conditions, option_parser
from penstock.simulating import evaluate

WIDTH, BLOCKS, SAMPLES, MICROBATCHES = 512, 12, 128, 16
STEPS, ROUNDS = 4, 4
TURN_SECONDS = 0.002
"""How long the held process runs, and then stands still."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.relu(self.wide(x)))


def build(**options: object) -> penstock.Pipeline:
    torch.manual_seed(0)
    model = [Block() for _ in range(BLOCKS)]
    return penstock.Pipeline(model, (torch.randn(SAMPLES, WIDTH),), F.mse_loss, sgd, **options)  # type: ignore[arg-type]


def rate(pipe: penstock.Pipeline) -> float:
    """Samples per second over some steps."""
    x = torch.randn(SAMPLES * MICROBATCHES, WIDTH)
    y = torch.zeros_like(x)
    float(pipe.step(x, y).loss)
    begun = time.perf_counter()
    for _ in range(STEPS):
        result = pipe.step(x, y)
    float(result.loss)
    return STEPS * len(x) / (time.perf_counter() - begun)


def work(path: Path) -> None:
    """One of the two processes; rank 0 writes what it found."""
    torch.set_num_threads(1)
    planned = build(plan="auto", schedule="1f1b-flush", microbatches=MICROBATCHES)
    assert planned.auto_plan is not None
    profile, cluster = planned.auto_plan.profile, planned.auto_plan.cluster
    equal = build(stages=2, schedule="1f1b-flush", microbatches=MICROBATCHES, balance="layers")
    rates: dict[str, list[float]] = {"planned": [], "equal": []}
    for _ in range(ROUNDS):
        rates["planned"].append(rate(planned))
        rates["equal"].append(rate(equal))
    if planned.plan.predicted is not None and planned.rank == 0:
        expected = evaluate(equal.plan, profile, cluster).samples_per_second
        found = {
            "plan": str(planned.plan),
            "speeds": [kind.speed for kind in cluster.kinds],
            "predicted": {"planned": planned.plan.predicted.samples_per_second, "equal": expected},
            "rates": rates,
        }
        path.write_text(json.dumps(found))
    planned.close()
    equal.close()


def hold(pid: int, over: Flag) -> None:
    """Stops and continues the process `pid` until `over`."""
    due = time.perf_counter()
    stopped = False
    try:
        while not over.is_set():
            stopped = not stopped
            os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
            due += TURN_SECONDS
            time.sleep(max(0.0, due - time.perf_counter()))
    finally:
        os.kill(pid, signal.SIGCONT)


def report(title: str, found: dict) -> list[str]:
    lines = [title, *("  " + line for line in found["plan"].splitlines())]
    speeds = ", ".join(f"{speed:.2f}" for speed in found["speeds"]) or "equal"
    lines.append(f"  speeds that were measured: {speeds}")
    medians = {name: statistics.median(values) for name, values in found["rates"].items()}
    for name, values in found["rates"].items():
        expected = found["predicted"][name]
        spread = (max(values) - min(values)) / medians[name]
        lines.append(
            f"  {name:8} {medians[name]:8.1f} samples/s measured (median of {len(values)} rounds, best "
            f"{max(values):.1f}, spread {spread:.0%}), {expected:.1f} predicted, measured / predicted "
            f"{medians[name] / expected:.2f}"
        )
    ratios = sorted(a / b for a, b in zip(found["rates"]["planned"], found["rates"]["equal"], strict=True))
    lines.append(
        f"  planned / equal: {statistics.median(ratios):.2f} (median; {ratios[0]:.2f} to {ratios[-1]:.2f} by round)"
    )
    return lines


def main() -> None:
    parser = option_parser(__doc__, worker=True)
    parser.add_argument("--hold", action="store_true", help="rank 1 to half its speed")
    options = parser.parse_args()
    if options.worker is not None:
        over = Event()
        holder = Process(target=hold, args=(os.getpid(), over), daemon=True)
        if options.hold and os.environ["RANK"] == "1":
            holder.start()
        work(options.worker)
        over.set()
        return
    shown = Report(options.save)
    shown.add(
        conditions("benchmarks/unequal.py"),
        f"{BLOCKS} blocks of {WIDTH} x {2 * WIDTH}, {MICROBATCHES} microbatches of {SAMPLES}, {STEPS} steps a round\n",
    )
    for title, held in (("one process held to half its speed", True), ("both processes at full speed", False)):
        shown.add(*report(title, launch_and_read(__file__, 2, options, hold=held)))


if __name__ == "__main__":
    main()
