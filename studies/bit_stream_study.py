"""Trains on the bit streams of Wang, Bai and Pekhimenko (MLSys 2020, section 4.1) with every method of a backward.

    python studies/bit_stream_study.py

A stream has 1,000 bits, drawn with one of ten probabilities; the class is which. The model is a recurrence of 20 hidden
values and a linear layer on the last ones, and 16 samples make a batch, all as in the paper. Its rate is 1e-5 over 80
epochs of 2,000 updates; here it is 1e-3 over 300 updates. The picture is in docs/scan.md.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convergence.pictures import Curve, Panel, draw
from penstock.scan import ScanRNN

ROOT = Path(__file__).parents[1]
CLASSES = 10
METHODS = ("nn.RNN", "linear", "blelloch", "chunked")
AVERAGED = 10
"""Updates of a point of a curve."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained."""

    steps: int = 1000
    width: int = 20
    samples: int = 16
    updates: int = 300
    rate: float = 1e-3
    dtype: torch.dtype = torch.float32

    def batch(self) -> tuple[Tensor, Tensor]:
        """Streams (T, B, 1), and their classes."""
        classes = torch.randint(CLASSES, (self.samples,))
        bits: Tensor = torch.bernoulli((0.05 + 0.1 * classes).expand(self.steps, -1)).unsqueeze(-1)
        return bits.to(self.dtype), classes


@dataclass(frozen=True, slots=True)
class Run:
    """A finished training: the loss at every update, and the processor's seconds up to it."""

    method: str
    losses: list[float]
    seconds: list[float]


def train(task: Task, method: str) -> Run:
    """`method`: ``nn.RNN``, or one of `ScanRNN`. All start from the same weights and see the same samples."""
    torch.manual_seed(0)
    recurrence: nn.RNN = (
        nn.RNN(1, task.width, dtype=task.dtype)
        if method == "nn.RNN"
        else ScanRNN(1, task.width, dtype=task.dtype, method=method)  # type: ignore[arg-type]
    )
    head = nn.Linear(task.width, CLASSES, dtype=task.dtype)
    optimizer = torch.optim.Adam([*recurrence.parameters(), *head.parameters()], lr=task.rate)
    run, spent = Run(method, [], []), 0.0
    for _ in range(task.updates):
        bits, classes = task.batch()
        start = time.process_time()
        loss = nn.functional.cross_entropy(head(recurrence(bits)[1][0]), classes)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        spent += time.process_time() - start
        run.losses.append(loss.item())
        run.seconds.append(spent)
    return run


def farthest(run: Run, other: Run) -> float:
    """The largest difference between the losses of an update."""
    return max(abs(one - two) for one, two in zip(run.losses, other.losses, strict=True))


def means(values: Sequence[float]) -> list[float]:
    """The mean of each `AVERAGED` updates."""
    return [sum(values[at : at + AVERAGED]) / AVERAGED for at in range(0, len(values) - AVERAGED + 1, AVERAGED)]


def table(runs: Sequence[Run]) -> list[str]:
    """Rows of Markdown."""
    rows = [
        "| backward | loss, first 10 updates | last 10 updates | largest difference at an update | processor seconds |",
        "|---|---:|---:|---:|---:|",
    ]
    for run in runs:
        curve = means(run.losses)
        far = "" if run is runs[0] else f"{farthest(run, runs[0]):.1e}"
        rows.append(f"| {run.method} | {curve[0]:.4f} | {curve[-1]:.4f} | {far} | {run.seconds[-1]:.0f} |")
    return rows


def picture(runs: Sequence[Run]) -> str:
    """Losses over updates, and over the processor's time."""
    panels = []
    for title in ("updates", "processor seconds"):
        curves = []
        for colour, run in enumerate(runs):
            places = [float(AVERAGED * (1 + number)) for number in range(len(means(run.losses)))]
            if title != "updates":
                places = [run.seconds[int(place) - 1] for place in places]
            points = zip(places, means(run.losses), strict=True)
            curves.append(Curve(run.method, colour, tuple((x, y, y, y) for x, y in points), dashed=colour > 0))
        panels.append(Panel(f"Loss over {title}", tuple(curves), title, "cross-entropy"))
    return draw([panels], "Losses of a training on bit streams, by the method of the backward")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on bit streams with every method of a backward.")
    parser.add_argument("--results", type=Path, default=ROOT / "studies/results/bit_streams.jsonl")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs/pictures", help="the folder for the picture")
    parser.add_argument("--updates", type=int, default=Task().updates)
    parser.add_argument("--report", action="store_true", help="run nothing, only make the table and the picture again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.results.parent.mkdir(exist_ok=True)
    if options.report:
        lines: list[dict[str, Any]] = [json.loads(line) for line in options.results.read_text().splitlines()]
        runs = [Run(**line) for line in lines]
    else:
        runs = []
        for method in METHODS:
            runs.append(train(Task(updates=options.updates), method))
            print(*table(runs)[-1:], flush=True)
        options.results.write_text("".join(json.dumps(_rounded(run)) + "\n" for run in runs))
    options.results.with_suffix(".md").write_text("\n".join([*table(runs), ""]))
    (options.pictures / "scan-bit-streams.svg").write_text(picture(runs))


def _rounded(run: Run) -> dict[str, Any]:
    """A line of the results; losses keep all digits of float32."""
    return {**asdict(run), "seconds": [round(each, 4) for each in run.seconds]}


if __name__ == "__main__":
    main()
