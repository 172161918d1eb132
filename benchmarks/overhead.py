"""Says what an action costs beyond its arithmetic, in microseconds, and where they go.

    python benchmarks/overhead.py

The first table has the whole: a step less its ideal, over the forwards and backwards of a rank, for Penstock over
shared memory and over Gloo, for torch's schedules, and for all stages in one process, where messages are references.
The second one divides Penstock's step by what its workers recorded, with the layers in a bare loop beside them.
benchmarks/README.md explains the terms.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from contenders.contenders import GLOO, ONE_PROCESS, Absent, Entry, Running, pipeline, running_pipeline
from contenders.jobs import JOBS, Setting, sgd
from contenders.lineup import entries_of
from measurement.ideals import ideal_seconds, overhead
from measurement.launches import everywhere, launch_and_read, outside_the_launch, timed
from measurement.reports import Report, conditions, option_parser
from measurement.rounds import TURN_SECONDS, joined, measure
from measurement.step_breakdown import Parts, parts_of
from penstock.scheduling import Step

PROCESSES = 2
STEPS = 8
"""That a pipeline's timeline keeps."""
ONE_WORLD = "penstock 1f1b-flush, one process"
SHOWN = ("one process", "torch gpipe", "torch 1f1b", "torch interleaved", "penstock gpipe", "penstock 1f1b-flush")
SHOWN += ("penstock interleaved", "penstock 2bw")
DIVIDED = ("penstock 1f1b-flush", "penstock 1f1b-flush" + GLOO, "penstock 2bw", "penstock 2bw" + GLOO)


Row = dict[str, Any]
"""A size, the name of a contender, and seconds: of a step, or of each forward and backward of a rank."""


def one_world() -> Entry:
    """All stages in rank 0's process: no transport, and no company."""

    def build(setting: Setting) -> Running:
        with outside_the_launch() if not dist.is_initialized() else nullcontext():
            pipe = pipeline(setting, stages=setting.processes, schedule="1f1b-flush")
        return running_pipeline(pipe, setting)

    return Entry(ONE_WORLD, build, alone=True)


def contenders(setting: Setting) -> list[Entry]:
    """The contenders of the tables."""
    names = {one for name in SHOWN for one in (name, name + GLOO)}
    found = [entry for entry in entries_of(setting) if entry.name in names and not isinstance(entry, Absent)]
    return [found[0], one_world(), *found[1:]]


def costs_of(
    size: str, entries: Sequence[Entry], setting: Setting, options: argparse.Namespace, running: dict[str, Running]
) -> list[Row]:
    """The first table. Collective."""
    found = measure([entry.name for entry in entries], running, setting, options.rounds, options.turn_seconds)
    single = found.times[ONE_PROCESS].wall
    costs = []
    for entry in entries[1:]:
        own = found.times[entry.name].wall
        if entry.alone:
            ideal, actions = list(single), 2 * setting.microbatches * setting.processes
        else:
            ideal = ideal_seconds(single, found.slowdowns, setting.processes, entry.lengthening)
            actions = entry.actions
        seconds = {"step": statistics.median(own), "ideal": statistics.median(ideal)}
        costs.append({"size": size, "name": entry.name, **seconds, "action": overhead(ideal, own, actions)})
    return costs


def divide(size: str, entry: Entry, running: Running, setting: Setting, repeats: int) -> Row:
    """This rank's row of the second table: medians over `repeats` times `STEPS` steps. Collective.

    Forward, backward and update are beyond the layers; `cut` (of the batch into microbatches) and `program` (made from
    the schedule) are measured apart; `rest` is before the first action, between actions and after the last.
    """
    pipe, rank = running.pipe, dist.get_rank()
    assert pipe is not None
    found: list[Parts] = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            running.step()
        seconds = (time.perf_counter() - start) / STEPS
        found.append(parts_of(pipe.timeline(STEPS).spans, rank, STEPS, seconds))
    mine = {field.name: statistics.median(getattr(parts, field.name) for parts in found) for field in fields(Parts)}
    inputs, target = setting.job.batch(setting.microbatches)
    cut = timed(lambda: pipe._splitter.for_step(inputs, target), 0.1)
    program = timed(lambda: pipe.schedule.row(rank, Step(1)), 0.1)
    forward, backward, update = bare_layers(setting, repeats * STEPS)
    seconds_of = {
        "layers_forward": forward,
        "layers_backward": backward,
        "layers_update": update,
        "forward": mine["forward"] - forward,
        "backward": mine["backward"] - backward,
        "update": mine["update"] - update,
        **{name: mine[name] for name in ("send", "message", "neighbour", "other")},
        "cut": cut,
        "program": program,
        # The next step's program is made before some action of this one, perhaps the first.
        "rest": mine["around"] + mine["between"] - cut - program,
    }
    shares = {name: one / entry.actions for name, one in seconds_of.items()}
    return {"size": size, "name": entry.name, "rank": rank, **shares, "total": sum(shares.values())}


def bare_layers(setting: Setting, steps: int) -> tuple[float, float, float]:
    """Seconds of this rank's layers in a step, without any library: forward, backward, update; medians over `steps`
    steps. All ranks at once.
    """
    job, rank = setting.job, dist.get_rank()
    model, cuts = job.build(), job.cuts(setting.processes)
    inputs, target = job.batch(1)
    layers = job.layers(model)
    with torch.no_grad():
        received = nn.Sequential(*layers[: cuts[rank]])(inputs)
    stage, last = nn.Sequential(*layers[cuts[rank] : cuts[rank + 1]]), rank == setting.processes - 1
    optimizer = sgd(list(stage.parameters()))
    series: list[tuple[float, float, float]] = []
    dist.barrier()
    for _ in range(steps):
        forward = backward = 0.0
        for _ in range(setting.microbatches):
            start = time.perf_counter()
            leaf = received.detach().requires_grad_(received.is_floating_point() and rank > 0)
            output = stage(leaf)
            result = job.loss(output, target) if last else output
            middle = time.perf_counter()
            result.backward(torch.ones_like(result))
            forward, backward = forward + middle - start, backward + time.perf_counter() - middle
        start = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        series.append((forward, backward, time.perf_counter() - start))
    first, second, third = (statistics.median(column) for column in zip(*series, strict=True))
    return first, second, third


def work(options: argparse.Namespace) -> None:
    """One process of a launch: writes both tables."""
    torch.set_num_threads(1)
    (size,) = options.sizes
    setting = Setting(JOBS[size], PROCESSES, options.microbatches)
    entries = contenders(setting)
    with joined(entries, setting) as running:
        costs = costs_of(size, entries, setting, options, running)
        divided = [entry for entry in entries if entry.name in DIVIDED]
        rows = [divide(size, entry, running[entry.name], setting, options.repeats) for entry in divided]
        divisions = [one for ranks in zip(*everywhere(rows), strict=True) for one in ranks]
        if dist.get_rank() == 0:
            options.worker.write_text(json.dumps({"costs": costs, "divisions": divisions}))


def cost_table(costs: Sequence[Row]) -> str:
    """The first table."""
    lines = [f"{costs[0]['size']:34}{'step ms':>10}{'ideal ms':>10}{'us/action':>11}"]
    lines += [
        f"{one['name']:34}{1e3 * one['step']:10.2f}{1e3 * one['ideal']:10.2f}{1e6 * one['action']:11.0f}"
        for one in costs
    ]
    return "\n".join(lines)


def division_table(divisions: Sequence[Row]) -> str:
    """The second table, a column for each rank of each contender."""
    lines = [f"{divisions[0]['size'] + ', us/action':34}" + "".join(f"{one['name'][9:]:>17}" for one in divisions)]
    lines.append(f"{'':34}" + "".join(f"{'rank ' + str(one['rank']):>17}" for one in divisions))
    for name in list(divisions[0])[3:]:
        words = f"{name[7:]} of the bare layers" if name.startswith("layers_") else name
        lines.append(f"{words:34}" + "".join(f"{1e6 * one[name]:17.1f}" for one in divisions))
    return "\n".join(lines)


def main() -> None:
    parser = option_parser(__doc__, worker=True)
    parser.add_argument("--sizes", nargs="+", choices=JOBS, default=["nano", "tiny"], help="of the model")
    parser.add_argument("--microbatches", type=int, default=8, help="of two samples, in a step")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument("--turn-seconds", type=float, default=TURN_SECONDS, help="of each contender, in a round")
    parser.add_argument("--repeats", type=int, default=20, help="of eight steps that are divided")
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return
    report = Report(options.save)
    report.add(conditions("benchmarks/overhead.py"))
    for size in options.sizes:
        reported = launch_and_read(__file__, PROCESSES, options, sizes=[size])
        report.add("", cost_table(reported["costs"]), "", division_table(reported["divisions"]))


if __name__ == "__main__":
    main()
