"""Contenders that live in the same processes and take turns, so that what slows the machine down slows all of them.

The same job takes up to 40 % more or less from one launch to the next: only ratios within one launch mean anything.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from contenders.contenders import Entry, Running
from contenders.jobs import Setting, plain_microbatch
from measurement.launches import everywhere
from measurement.slowdowns import groups_up_to, seconds_in_company

WARM_UP_STEPS = 3
TURN_SECONDS = 0.5
"""How long a turn lasts, so that the barriers around it do not count."""


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one contender, in seconds per step, one for each round."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    """In all processes together, threads included: what other work on the machine changes least."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """What was measured; the same on every rank."""

    times: Mapping[str, Times]
    slowdowns: list[float]
    """How much longer a stage's share of the work takes when all processes are busy, by round."""
    distances: Mapping[str, float]
    """How far each contender's weights moved in the first steps: equal, but for rounding, where the training is."""


@contextmanager
def joined(entries: Sequence[Entry], setting: Setting, meeting: str | None = None) -> Iterator[dict[str, Running]]:
    """This process's part of all contenders, in the process group of this launch, or of those that meet at the file
    `meeting`. Contenders that rank 0 trains alone are there on rank 0 only.
    """
    rank = int(os.environ["RANK"])
    running: dict[str, Running] = {}
    # A pipeline that is built before the processes join lives in its process alone.
    for entry in entries:
        if entry.alone and rank == 0:
            running[entry.name] = entry.build(setting)
    if meeting is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=setting.processes)
    for entry in entries:
        if not entry.alone:
            running[entry.name] = entry.build(setting)
    yield running
    dist.barrier()
    for one in running.values():
        one.close()
    dist.destroy_process_group()


def measure(
    names: Sequence[str], running: Mapping[str, Running], setting: Setting, rounds: int, turn_seconds: float
) -> Rounds:
    """`rounds` rounds, in which every contender takes steps for `turn_seconds` in its turn. Collective."""
    distances = {name: _warm_up(running.get(name), setting) for name in names}
    groups = groups_up_to(setting.processes)
    walls: dict[str, list[float]] = {name: [] for name in names}
    processors: dict[str, list[float]] = {name: [] for name in names}
    slowdowns = []
    steps = {name: _steps_of_a_turn(running.get(name), turn_seconds) for name in names}
    for number in range(rounds):
        company = seconds_in_company(_share_of(setting), groups, turn_seconds)
        slowdowns.append(company[-1] / company[0])
        # Each round begins with another one, so that none always follows the same.
        turn = number * len(names) // rounds
        for name in (*names[turn:], *names[:turn]):
            wall, processor = _take_turn(running.get(name), steps[name])
            walls[name].append(wall)
            processors[name].append(processor)
    reported = everywhere(processors)
    times = {
        name: Times(walls[name], [sum(column) for column in zip(*(one[name] for one in reported), strict=True)])
        for name in names
    }
    return everywhere(Rounds(times, slowdowns, distances))[0]


def _take_turn(contender: Running | None, steps: int) -> tuple[float, float]:
    """Wall and processor seconds of a step; who has no part in it waits."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(steps if contender is not None else 0):
        contender.step()
    dist.barrier()
    return (time.perf_counter() - wall) / steps, (time.process_time() - processor) / steps


def _steps_of_a_turn(contender: Running | None, turn_seconds: float) -> int:
    """The same on all ranks, which step together."""
    pilot, _ = _take_turn(contender, 2)
    return everywhere(math.ceil(turn_seconds / pilot))[0]


def _share_of(setting: Setting) -> Callable[[], object]:
    """A microbatch of a stage's share, forward and backward, in a plain loop."""
    return plain_microbatch(setting.job.share(setting.processes))


def _warm_up(contender: Running | None, setting: Setting) -> float:
    """Takes some steps; how far the weights have moved by then. Collective."""
    square = torch.zeros(1, dtype=torch.float64)
    if contender is not None:
        for _ in range(WARM_UP_STEPS):
            contender.step()
    dist.barrier()
    if contender is not None:
        before = dict(setting.job.build().named_parameters())
        for name, parameter in contender.parameters.items():
            square += (parameter.detach() - before[name].detach()).double().square().sum()
    dist.all_reduce(square)
    return float(square.sqrt())
