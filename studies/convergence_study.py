"""Trains the same models by every schedule and correction, and sets their losses side by side.

    python studies/convergence_study.py

One JSON line is written per finished run, so that an interrupted study goes on where it stopped. Then the tables and
the pictures of docs/convergence.md are made from these lines; with `--report` only that.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import penstock
from convergence import report
from convergence.tasks import STAGES, TASKS, Task, straight_plan
from convergence.training import METHODS, MICROBATCHES, QUICK, Run, train

ROOT = Path(__file__).parents[1]
NETWORKS = {"2 GB/s": 2e9, "1 Gbit/s": 1.25e8}
"""Bytes per second between any two of the devices."""
SEEDS = (0, 1, 2)
"""Rates are chosen with the first one."""
LONGER = (
    "data parallelism",
    "pipedream",
    "2bw",
    "2bw, weight prediction",
    "2bw, error feedback",
    "2bw, NAdam",
    "pipedream, NAdam",
)
"""Methods that have a longer run."""
Records = dict[str, dict[str, Any]]
"""Finished runs by key."""


@dataclass(frozen=True, slots=True)
class Study:
    """What is to be run."""

    stages: int = STAGES
    quick: bool = False
    """A few updates, one rate, one seed: whether it runs, not what comes out."""
    only: tuple[str, ...] = ()
    """Runs whose key contains one of these; all, if there are none."""

    def missing(self, records: Records) -> Run | None:
        """The next run that is wanted and not among the `records`; what is wanted depends on them."""
        pairs = [(task, optimizer) for task in TASKS.values() for optimizer in task.rates]
        for wanted in (self._grids, self._seeds, self._longer):
            for task, optimizer in pairs:
                for run in wanted(task, optimizer, records):
                    chosen = not self.only or any(part in run.key for part in self.only)
                    if chosen and run.key not in records:
                        return run
        return None

    def _grids(self, task: Task, optimizer: str, records: Records) -> Iterable[Run]:
        """Every rate of every method with the first seed.

        The flushing pipeline need not show more than that it is data parallelism, once.
        """
        for name in self._methods(task, optimizer):
            yield from self._grid(task, optimizer, name)
        shared = self._best(task, optimizer, "data parallelism", records)
        if shared is not None:
            yield self._run(task, optimizer, "flush", shared, SEEDS[0])

    def _seeds(self, task: Task, optimizer: str, records: Records) -> Iterable[Run]:
        """The other seeds at the rate that was best for the method."""
        for name in [] if self.quick else self._methods(task, optimizer):
            rate = self._best(task, optimizer, name, records)
            if rate is not None:
                yield from (self._run(task, optimizer, name, rate, seed) for seed in SEEDS[1:])

    def _longer(self, task: Task, optimizer: str, records: Records) -> Iterable[Run]:
        """One longer run of some methods at the rate that was best in the short ones."""
        if self.quick or optimizer not in task.longer:
            return
        for name in LONGER:
            rate = self._best(task, optimizer, name, records)
            if rate is not None:
                yield replace(self._run(task, optimizer, name, rate, SEEDS[0]), updates=task.longer[optimizer])

    def _methods(self, task: Task, optimizer: str) -> list[str]:
        """The methods of the study, but the one that has the numbers of another."""
        return [name for name, method in METHODS.items() if method.trains(task.name, optimizer) and name != "flush"]

    def _grid(self, task: Task, optimizer: str, method: str) -> list[Run]:
        rates = task.rates[optimizer][1:2] if self.quick else task.rates[optimizer]
        return [self._run(task, optimizer, method, rate, SEEDS[0]) for rate in rates]

    def _best(self, task: Task, optimizer: str, method: str, records: Records) -> float | None:
        """The rate of the grid with the least loss at the end; None while one is missing."""
        grid = self._grid(task, optimizer, method)
        if any(run.key not in records for run in grid):
            return None
        return min(grid, key=lambda run: final_loss(records[run.key])).rate

    def _run(self, task: Task, optimizer: str, method: str, rate: float, seed: int) -> Run:
        return Run(task.name, optimizer, method, rate, seed, self.stages, QUICK if self.quick else task.updates)


def final_loss(record: dict[str, Any]) -> float:
    """On the held-out samples after the last update; infinite if the run diverged."""
    return math.inf if record["diverged"] else float(record["final"])


def seconds_per_update(task: Task, stages: int) -> dict[str, dict[str, float]]:
    """By network and method, without corrections: what an update takes on `stages` devices, as simulated.

    The layers are measured on this machine with the samples of one microbatch; a microbatch of a whole minibatch counts
    in proportion to its samples. Optimizers and corrections take no time.
    """
    inputs, target = task.batches.held_out
    size = task.samples // MICROBATCHES
    torch.manual_seed(0)
    layers = task.build()
    profile = penstock.profile(layers, (inputs[:size],), loss_fn=task.loss_fn, target=target[:size], progress=False)
    everywhere = penstock.Stage(0, len(layers), tuple(range(stages)))
    seconds: dict[str, dict[str, float]] = {}
    for network, bandwidth in NETWORKS.items():
        cluster = penstock.Cluster.uniform(stages, bandwidth)
        seconds[network] = {}
        for method in METHODS.values():
            if method.correction or (not method.schedule and method.whole):
                continue
            measured = profile.scaled(task.samples) if method.whole else profile
            plan = penstock.Plan((everywhere,), "1f1b-flush", microbatches=MICROBATCHES)
            if method.schedule:
                microbatches = 1 if method.whole else MICROBATCHES
                plan = straight_plan(task, method.schedule, stages, microbatches, method.vertical_sync)
            # What 16 more updates take: the pipe is full before and after.
            short, long = (penstock.simulate(plan, measured, cluster, minibatches=count) for count in (16, 32))
            seconds[network][method.name] = (long.seconds - short.seconds) / 16
    return seconds


def read(path: Path) -> Records:
    """The finished runs by key; a line that an interruption cut short is left out."""
    records = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        records[record["key"]] = record
    return records


def append(path: Path, record: dict[str, Any]) -> None:
    """One more line, on the disk when this returns."""
    text = path.read_text() if path.exists() else ""
    with path.open("a") as file:
        file.write(("" if not text or text.endswith("\n") else "\n") + json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def carry_out(study: Study, path: Path) -> None:
    """Runs what is missing."""
    records = read(path)
    for task in TASKS.values():
        key = f"seconds/{task.name}/{study.stages}"
        if key not in records and not study.only:
            append(path, {"key": key, "seconds": seconds_per_update(task, study.stages)})
    while (run := study.missing(records)) is not None:
        started = time.perf_counter()
        result = train(run)
        took = time.perf_counter() - started
        records[run.key] = {"key": run.key, **asdict(run), **result, "took_seconds": round(took, 1)}
        append(path, records[run.key])
        print(f"{run.key}: {result.get('final', 'diverged')} ({took:.1f} s)", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Trains the same models by every schedule and correction.")
    parser.add_argument("--results", type=Path, default=ROOT / "studies/convergence/results/convergence.jsonl")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs/pictures", help="the folder for pictures")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} updates, one rate, one seed")
    parser.add_argument("--only", action="append", default=[], help="only runs whose key contains this; repeatable")
    parser.add_argument("--stages", type=int, choices=(1, STAGES), default=STAGES)
    parser.add_argument("--report", action="store_true", help="run nothing, only make tables and pictures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if not options.report:
        carry_out(Study(options.stages, options.quick, tuple(options.only)), options.results)
    if not options.quick and not options.only:
        report.write(read(options.results), options.results.with_suffix(".md"), options.pictures)


if __name__ == "__main__":
    main()
