"""A process of the benchmark on one device: trains each contender in turn with a plain loop, and says what it took.

Not all contenders fit on the device at once. So each is built alone, beside a plain loop that stays, and the two take
turns: what slows the device down slows both, and their ratio, round by round, is what can be compared. What a contender
takes of the memory is read before, in a turn after which nothing else has run: later the allocator also has what it
took for the plain loop.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from time import perf_counter

import torch
import torch.distributed as dist

import penstock
from contenders.contenders import Entry, Running, plain_loop
from contenders.jobs import Language
from gpu_benchmark.devices import Card, Memory, matrix_rate
from gpu_benchmark.lineup import Contender, Launch, Size, Variant, contenders_of, setting_of, variants_of
from penstock.scheduling import Step
from penstock.timelines.timelines import Timeline

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

    ready_seconds: float
    """Until the first steps were done: building it, and compiling where that is asked for."""
    wall: list[float]
    """Until the device was done, and all processes."""
    host: list[float]
    """Until the step returned."""
    plain_wall: list[float]
    """The same of the plain loop; in the other processes than the first, of waiting for it."""
    plain_host: list[float]
    idle_shares: list[float]
    """Of a pipeline, by round: see `idle_share`."""
    losses: list[float]
    """Of the first steps, where this process knows them."""
    peak: Memory | None
    """The most that it took of the device's memory; None on a device that does not count."""
    held_bytes: int | None
    """And what its tensors take when nothing is in flight."""
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
        self._plain: dict[tuple[Variant, Language], Running] = {}
        """By how and what it trains, in the first process."""

    def __call__(self, order: str) -> Facts | list[Taken] | None:
        """What a contender took with the model, and with the narrow one if its variant has that; to `FACTS` the first
        process answers.
        """
        if order == FACTS and dist.get_rank() > 0:
            return None
        if order == FACTS:
            return Facts(self._card.name, matrix_rate(self._card, self._size.matrix, torch.bfloat16))
        every = contenders_of(self._launch, self._size, self._card.device)
        (contender,) = (one for one in every if one.name == order)
        jobs = (self._size.model, self._size.narrow) if contender.variant.narrow else (self._size.model,)
        taken = {job: self._measure(contender, job) for job in dict.fromkeys(jobs)}
        return [taken[job] for job in jobs]

    def _measure(self, contender: Contender, job: Language) -> Taken:
        assert isinstance(contender.entry, Entry), "what does not fit is no order"
        card = self._card
        plain = self._plain_loop(contender.beside, job)
        card.tidy()
        before = card.held()
        start = perf_counter()
        running = self._build(contender.entry, contender.variant, job)
        losses = _warm_up(running)
        ready = perf_counter() - start
        # What building has left behind belongs to no turn.
        card.tidy()
        peak = self._take_turn(running).peak
        if plain is not None:
            # What it had left to the device for the next time has been given back above.
            plain.step()
        own: list[_Turn] = []
        beside: list[_Turn] = []
        idle = []
        for number in range(self._size.rounds):
            # Neither always follows the other.
            for turns, one in ((own, running), (beside, plain))[:: -1 if number % 2 else 1]:
                turns.append(self._take_turn(one))
                if one is running and running.pipe is not None:
                    idle.append(idle_share(running.pipe.timeline(self._size.steps)))
        held = self._held(running)
        taken = Taken(
            ready_seconds=ready,
            wall=[turn.wall for turn in own],
            host=[turn.host for turn in own],
            plain_wall=[turn.wall for turn in beside],
            plain_host=[turn.host for turn in beside],
            idle_shares=idle,
            losses=losses,
            peak=None if before is None or peak is None else peak.beyond(before),
            held_bytes=None if before is None or held is None else held.beyond(before).allocated,
            actions=0 if running.pipe is None else _actions(running.pipe),
            versions_bytes=0 if running.pipe is None else _versions_bytes(running.pipe, job),
        )
        if contender.stays:
            self._plain[contender.variant, job] = running
        else:
            running.close()
        return taken

    def _plain_loop(self, variant: Variant, job: Language) -> Running | None:
        """The one that the others take turns with; None but in the first process."""
        if dist.get_rank() > 0:
            return None
        kept = (self._usual, variant)
        self._plain = {key: running for key, running in self._plain.items() if key[0] in kept}
        if (variant, job) not in self._plain:
            self._plain[variant, job] = self._build(plain_loop(), variant, job)
            _warm_up(self._plain[variant, job])
        return self._plain[variant, job]

    @property
    def _usual(self) -> Variant:
        return variants_of(self._size)[0]

    def _build(self, entry: Entry, variant: Variant, job: Language) -> Running:
        return entry.build(setting_of(job, self._size, self._card.device, self._launch.ranks, variant))

    def _take_turn(self, contender: Running | None) -> "_Turn":
        """Collective; who has no part in it waits."""
        card, steps = self._card, self._size.steps
        card.forget_peak()
        dist.barrier()
        start = perf_counter()
        if contender is not None:
            for _ in range(steps):
                contender.step()
        returned = perf_counter()
        card.synchronize()
        peak = card.peak()
        dist.barrier()
        return _Turn((perf_counter() - start) / steps, (returned - start) / steps, peak)

    def _held(self, running: Running) -> Memory | None:
        if running.pipe is not None:
            running.pipe.drain()
        self._card.synchronize()
        return self._card.held()


@dataclass(frozen=True, slots=True)
class _Turn:
    """One contender: the seconds of a step until the device was done and until the step returned, and the peak."""

    wall: float
    host: float
    peak: Memory | None


def _warm_up(running: Running) -> list[float]:
    """The losses of the first steps, as far as this process knows them."""
    reported = [[float(loss) for loss in running.step()] for _ in range(WARM_UP_STEPS)]
    return [fmean(losses) for losses in reported if losses]


def idle_share(timeline: Timeline) -> float:
    """The share of the wall time in which no rank has a forward, a backward or an update under way."""
    return Timeline(tuple(replace(span, rank=0) for span in timeline.spans), ranks=1).bubble


def _actions(pipe: penstock.Pipeline) -> int:
    """The actions of the ranks in this process, in a step once the pipe is full."""
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
