"""One process of a trial: all contenders take turns on the hosts, and each is predicted from what was measured beside.

    python -m hosts.trials REPORT --size big ...

`compare.py` starts it on every host. What is measured for the predictions: the layers, while the others sleep; how much
longer a stage's share takes while they compute; an update; and the links, by `penstock.probe`.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


import penstock
from contenders.contenders import Entry, Running
from contenders.jobs import JOBS, Setting
from hosts.lineup import AUTO, lineup
from measurement.launches import alone, everywhere
from measurement.rounds import Rounds, joined, measure
from penstock.errors import PlanError
from penstock.simulating import evaluate


@dataclass(frozen=True, slots=True)
class Trial:
    """What one launch has found, as plain values."""

    walls: dict[str, list[float]]
    """By contender: seconds per step, one for each round."""
    predicted: dict[str, float]
    """By contender that is one of Penstock's: seconds per step."""
    plan: str
    """What `plan="auto"` has chosen, in words."""
    planned_seconds: float
    """And what the planner predicted of it."""
    slowdowns: list[float]
    cluster: list[list[float]]
    """Of the link from the first host to the second one and back: bytes per second, seconds."""


def update_seconds_per_byte(setting: Setting) -> float:
    """Seconds of an update per byte of weights."""
    parameters = list(setting.job.build().parameters())
    optimizer = setting.optimizer(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / sum(4 * parameter.numel() for parameter in parameters)


def predictions(setting: Setting, running: Mapping[str, Running], slowdowns: tuple[float, ...]) -> dict[str, float]:
    """By contender: the seconds of a step by the simulator. Collective."""
    inputs, target = setting.job.batch(1)
    profile = alone(
        lambda: penstock.profile(setting.job.build(), (inputs,), loss_fn=setting.job.loss, target=target, iterations=20)
    )
    update = alone(lambda: update_seconds_per_byte(setting))
    cluster = penstock.probe()
    found = {}
    for name, one in running.items():
        if one.pipe is None or one.pipe.plan.ranks != setting.processes:
            continue
        plan = one.pipe.plan
        factors = () if plan.routing == "split" else slowdowns
        try:
            outcome = evaluate(plan, profile, cluster, slowdowns=factors, update_seconds_per_byte=update)
        except PlanError:
            continue
        found[name] = outcome.minibatch_seconds
    return found


def take_part(entries: Sequence[Entry], setting: Setting, rounds: int, turn_seconds: float) -> Trial:
    """What all processes find together; the same on every rank."""
    with joined(entries, setting) as running:
        found: Rounds = measure([entry.name for entry in entries], running, setting, rounds, turn_seconds)
        busy = statistics.median(found.slowdowns)
        factors = tuple(1 + (busy - 1) * others / max(1, setting.processes - 1) for others in range(setting.processes))
        predicted = predictions(setting, running, factors)
        automatic = running[AUTO].pipe
        assert automatic is not None and automatic.auto_plan is not None and automatic.plan.predicted is not None
        links = automatic.auto_plan.cluster
        ways = ((0, 1), (1, 0))
        made = Trial(
            {name: times.wall for name, times in found.times.items()},
            predicted,
            str(automatic.plan),
            automatic.plan.predicted.minibatch_seconds,
            found.slowdowns,
            [[links.bandwidth(*way) for way in ways], [links.latency(*way) for way in ways]],
        )
        return everywhere(made)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--size", choices=JOBS, required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--turn-seconds", type=float, required=True)
    parser.add_argument("--only", nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting(JOBS[options.size], options.hosts, options.microbatches)
    entries = [one for one in lineup(setting, options.only) if isinstance(one, Entry)]
    trial = take_part(entries, setting, options.rounds, options.turn_seconds)
    if os.environ["RANK"] == "0":
        options.report.write_text(json.dumps(asdict(trial)))


if __name__ == "__main__":
    main()
