"""Plans around a slow device: two processes, of which one is held to half its speed.

    nice -n -20 python benchmarks/unequal.py --save benchmarks/results/unequal.txt

A process that is stopped and continued in turns (SIGSTOP, SIGCONT) for equal times does half the work in a time. It
stands for a device of half the speed. Two processes train a chain of equal blocks, one core each. ``plan="auto"``
measures the layers on rank 0 and the speeds of both, and plans; the contender has equal stages under the same schedule
with the same microbatches. The two take turns, round by round. Prints the samples per second of both, what the
simulator predicted, and the spread over the rounds.
"""

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
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


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)  # type: ignore[arg-type]


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


def work() -> None:
    """One of the two processes; rank 0 prints what it found."""
    torch.set_num_threads(1)
    planned = build(plan="auto", schedule="1f1b-flush", microbatches=MICROBATCHES)
    assert planned.auto_plan is not None
    profile, cluster = planned.auto_plan.profile, planned.auto_plan.cluster
    equal = build(stages=2, schedule="1f1b-flush", microbatches=MICROBATCHES, balance="layers")
    rates: dict[str, list[float]] = {"planned": [], "equal": []}
    for _ in range(ROUNDS):
        rates["planned"].append(rate(planned))
        rates["equal"].append(rate(equal))
    if planned.plan.predicted is not None and int(os.environ["RANK"]) == 0:
        expected = evaluate(equal.plan, profile, cluster).samples_per_second
        found = {
            "plan": str(planned.plan),
            "speeds": [kind.speed for kind in cluster.kinds],
            "predicted": {"planned": planned.plan.predicted.samples_per_second, "equal": expected},
            "rates": rates,
        }
        print(json.dumps(found), flush=True)
    planned.close()
    equal.close()


def hold(pid: int, over: threading.Event) -> None:
    """Stops and continues the process `pid` until `over`."""
    due = time.perf_counter()
    stopped = False
    try:
        while not over.is_set():
            stopped = not stopped
            os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
            due += TURN_SECONDS
            time.sleep(max(0.0, due - time.perf_counter()))
    except ProcessLookupError:
        return
    finally:
        if stopped:
            os.kill(pid, signal.SIGCONT)


def launch(held: bool) -> dict:
    """Runs both processes, with rank 1 held to half its speed or not."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--work"],
            env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    over = threading.Event()
    holder = threading.Thread(target=hold, args=(started[1].pid, over), daemon=True)
    if held:
        holder.start()
    out, _ = started[0].communicate(timeout=500)
    over.set()
    if held:
        holder.join()
    started[1].communicate(timeout=60)
    if any(process.returncode for process in started):
        raise RuntimeError("a process has failed; its error is above")
    return json.loads(out.splitlines()[-1])


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, help="write the figures to this file as well")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work()
        return
    load = os.getloadavg()[0]
    lines = [
        "python benchmarks/unequal.py",
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, nice {os.nice(0)}, "
        f"load of the machine at the start {load:.1f}",
        f"{BLOCKS} blocks of {WIDTH} x {2 * WIDTH}, {MICROBATCHES} microbatches of {SAMPLES}, {STEPS} steps a round",
        "",
    ]
    print("\n".join(lines), flush=True)
    for title, held in (("one process held to half its speed", True), ("both processes at full speed", False)):
        found = report(title, launch(held=held))
        print("\n".join(found), flush=True)
        lines += found
        if arguments.save:
            arguments.save.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
