"""One process of a trial: all contenders take turns on the hosts, and each is predicted from what was measured beside.

    python -m hosts.trials REPORT --size big ...

`compare.py` starts it on every host. The predictions are made of what ``plan="auto"`` has measured: the layers, and the
links with what messages and actions cost. A shared machine is up to a tenth faster or slower in one minute than in the
next. So the layers take their turns among the contenders, and their seconds are scaled to those of the rounds. Nothing
is fitted to the steps of a pipeline.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from contenders.contenders import Entry, Running
from contenders.jobs import JOBS, Setting
from hosts.lineup import AUTO, LAYERS, lineup
from measurement.launches import everywhere
from measurement.rounds import Rounds, joined, measure
from penstock.autoplans import AutoPlan
from penstock.profiling.training_loops import as_in_training
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
    """And what the planner predicted of it, by the layers before the rounds."""
    link: dict[str, float]
    """What the probe has found of the link from the first host to the second one, and of an action."""


def predictions(running: Mapping[str, Running], measured: AutoPlan, layers: Sequence[float]) -> dict[str, float]:
    """By contender of Penstock's: the seconds of a step, by the simulator and what ``plan="auto"`` has measured.

    `layers`: the seconds of a forward and backward of the whole model, in each round.
    """
    profile = as_in_training(measured.profile, [layers])
    return {
        name: evaluate(one.pipe.plan, profile, measured.cluster).minibatch_seconds
        for name, one in running.items()
        if one.pipe is not None and one.pipe.plan.ranks == measured.cluster.devices
    }


def take_part(entries: Sequence[Entry], setting: Setting, rounds: int, turn_seconds: float) -> Trial:
    """What all processes find together; the same on every rank."""
    with joined(entries, setting) as running:
        found: Rounds = measure([entry.name for entry in entries], running, setting, rounds, turn_seconds)
        automatic = running[AUTO].pipe
        assert automatic is not None and automatic.auto_plan is not None and automatic.plan.predicted is not None
        links = automatic.auto_plan.cluster
        walls = {name: times.wall for name, times in found.times.items()}
        layers = walls.pop(LAYERS)
        made = Trial(
            walls,
            predictions(running, automatic.auto_plan, layers),
            str(automatic.plan),
            automatic.plan.predicted.minibatch_seconds,
            {
                "bytes_per_second": links.bandwidth(0, 1),
                "latency_seconds": links.latency(0, 1),
                "message_seconds": links.message_costs(0, 1).seconds,
                "message_seconds_per_byte": links.message_costs(0, 1).seconds_per_byte,
                "action_seconds": links.action_seconds,
            },
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
