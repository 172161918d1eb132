"""A process of the benchmark on one device: trains each contender in turn with a plain loop, and says what it took.

Not all contenders fit on the device at once. So each is built alone, beside a plain loop that stays, and the two take
turns: what slows the device down slows both, and their ratio, round by round, is what can be compared.
"""

import gc
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import perf_counter

import torch
import torch.distributed as dist
from cards import Card, matrix_rate
from contenders import Entry, Running, plain_loop
from gpu_lineup import Launch, Size, entries_of, setting_of
from jobs import Language, Setting

import penstock
from penstock.scheduling import Step

WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Facts:
    """What a launch finds before any contender."""

    device: str
    matrix_flops: float
    """Floating-point operations per second of large products in the type that contenders compute in."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one contender took in one process, in seconds for a step, one for each round."""

    wall: list[float]
    """Until the device was done, and all processes."""
    host: list[float]
    """Until the step returned."""
    plain_wall: list[float]
    """The same of the plain loop; in the other processes than the first, of waiting for it."""
    plain_host: list[float]
    losses: list[float]
    """Of the first steps, where this process knows them."""
    peak_bytes: int | None
    """The most that its tensors took in a turn; None on a device that does not count."""
    held_bytes: int | None
    """And what they take when nothing is in flight."""
    actions: int
    """Of a pipeline: what this process does in a step once the pipe is full, sends and receives among it; else 0."""
    versions_bytes: int
    """Of a pipeline: all weight versions of all its stages but one of each, by the schedule; else 0."""


FACTS = "facts"
"""The order before those that are names of contenders."""


class Bench:
    """One process of a launch."""

    def __init__(
        self, rank: int, processes: int, launch: Launch, size: Size, device: torch.device, meeting: Path
    ) -> None:
        self._card, self._size, self._launch = Card(device), size, launch
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # NCCL refuses two processes on one GPU.
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes)
        self._plain: dict[Language, Running] = {}
        """By model, in the first process."""

    def __call__(self, order: str) -> Facts | list[Taken] | None:
        """What a contender took with the model, and with the narrow one; to `FACTS` the first process answers."""
        if order == FACTS and dist.get_rank() > 0:
            return None
        if order == FACTS:
            return Facts(self._card.name, matrix_rate(self._card, self._size.matrix, torch.bfloat16))
        jobs = (self._size.model, self._size.narrow)
        taken = {job: self._measure(order, job) for job in dict.fromkeys(jobs)}
        return [taken[job] for job in jobs]

    def _measure(self, name: str, job: Language) -> Taken:
        card = self._card
        setting = setting_of(job, self._size, card.device, self._launch.ranks)
        plain = self._plain_loop(job, setting)
        card.tidy()
        before = card.held_bytes()
        running = _find(self._launch, setting, name).build(setting)
        losses = _warm_up(running)
        if plain is not None:
            # What it had left to the device for the next time has been given back above.
            plain.step()
        # What building has left behind is nobody's turn's matter.
        gc.collect()
        own, beside = [], []
        for number in range(self._size.rounds):
            # Neither always follows the other.
            for turns, one in ((own, running), (beside, plain))[:: -1 if number % 2 else 1]:
                turns.append(self._take_turn(one))
        held = self._held_bytes(running)
        taken = Taken(
            wall=[turn.wall for turn in own],
            host=[turn.host for turn in own],
            plain_wall=[turn.wall for turn in beside],
            plain_host=[turn.host for turn in beside],
            losses=losses,
            peak_bytes=_beyond(before, max((turn.peak for turn in own if turn.peak is not None), default=None)),
            held_bytes=_beyond(before, held),
            actions=0 if running.pipe is None else _actions(running.pipe),
            versions_bytes=0 if running.pipe is None else _versions_bytes(running.pipe, job),
        )
        running.close()
        return taken

    def _plain_loop(self, job: Language, setting: Setting) -> Running | None:
        """The one that the others take turns with; None but in the first process."""
        if dist.get_rank() > 0:
            return None
        if job not in self._plain:
            self._plain[job] = plain_loop().build(setting)
            _warm_up(self._plain[job])
        return self._plain[job]

    def _take_turn(self, contender: Running | None) -> "_Turn":
        """Collective; who has no part in it waits."""
        card, steps = self._card, self._size.steps
        card.forget_peak()
        dist.barrier()
        start = perf_counter()
        for _ in range(steps if contender is not None else 0):
            contender.step()
        returned = perf_counter()
        card.synchronize()
        peak = card.peak_bytes()
        dist.barrier()
        return _Turn((perf_counter() - start) / steps, (returned - start) / steps, peak)

    def _held_bytes(self, running: Running) -> int | None:
        if running.pipe is not None:
            running.pipe.drain()
        self._card.synchronize()
        return self._card.held_bytes()


@dataclass(frozen=True, slots=True)
class _Turn:
    """Of one contender: seconds of a step until the device was done and until the step returned, bytes at the peak."""

    wall: float
    host: float
    peak: int | None


def _find(launch: Launch, setting: Setting, name: str) -> Entry:
    (found,) = (entry for entry in entries_of(launch, setting) if entry.name == name and isinstance(entry, Entry))
    return found


def _warm_up(running: Running) -> list[float]:
    """The losses of the first steps, as far as this process knows them."""
    told = [[float(loss) for loss in running.step()] for _ in range(WARM_UP_STEPS)]
    return [fmean(losses) for losses in told if losses]


def _beyond(before: int | None, found: int | None) -> int | None:
    return None if before is None or found is None else found - before


def _actions(pipe: penstock.Pipeline) -> int:
    """Of the ranks in this process, in a step once the pipe is full."""
    schedule = pipe.schedule
    ranks = [pipe.rank] if dist.get_world_size() > 1 else range(schedule.ranks)
    return sum(len(schedule.row(rank, Step(schedule.ranks))) for rank in ranks)


def _versions_bytes(pipe: penstock.Pipeline, job: Language) -> int:
    with torch.device("meta"):
        layers = job.layers(job.build())
    return sum(
        (pipe.schedule.versions(index) - 1)
        * sum(p.nbytes for layer in layers[stage.start : stage.stop] for p in layer.parameters())
        for index, stage in enumerate(pipe.plan.stages)
    )
