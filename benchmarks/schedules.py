"""Times Penstock's schedules beside one process and beside torch's own, in one launch.

    torchrun --nproc-per-node 2 benchmarks/schedules.py --size tiny

The same job takes up to 40 % more or less from one launch to the next, so all contenders live in the same two processes
and take turns: only ratios within one launch mean anything. All train the GPT of examples/train_gpt.py with plain SGD,
cut between the same layers; while one process trains alone the other one sleeps.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

import penstock

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from train_gpt import BYTES, GPT, loss_fn

MICROBATCH_SIZE = 2
RANKS = 2
WARM_UP_STEPS = 2
LEARNING_RATE = 1e-3
DESCRIPTION = "Times Penstock's schedules beside one process and beside torch's own, in one launch."


@dataclass(frozen=True, slots=True)
class Size:
    """How big the model is."""

    width: int
    heads: int
    blocks: int
    context: int

    def build(self) -> GPT:
        torch.manual_seed(0)
        return GPT(self.context, self.width, self.heads, self.blocks)


SIZES = {"big": Size(256, 8, 8, 64), "tiny": Size(64, 4, 4, 32)}


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train, ready to be stepped."""

    name: str
    step: Callable[[], object]
    ideal: float
    """The step time that it would have at best, as a share of the single process's."""
    peer: str | None = None
    """The contender with torch's implementation of the same schedule."""


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one contender, in milliseconds per step."""

    name: str
    median: float
    least: float
    most: float
    processor: float
    """Of processor time in both processes together, threads included: what other work on the machine changes least."""
    share_of_ideal: float
    speedup_over_torch: float | None


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def layers_of(model: GPT) -> list[nn.Module]:
    """The layers that Penstock cuts between, in order."""
    return [model.embedding, *model.blocks, model.head]


def alone(size: Size, tokens: Tensor, target: Tensor, microbatches: int) -> Contender:
    """A plain training loop in one process, which accumulates gradients over the same microbatches."""
    model = size.build()
    optimizer = sgd(list(model.parameters()))

    def step() -> None:
        if dist.get_rank() != 0:
            return
        for part, expected in zip(tokens.chunk(microbatches), target.chunk(microbatches), strict=True):
            (loss_fn(model(part), expected) / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Contender("one process", step, ideal=1.0)


def torch_contender(
    name: str, kind: type, size: Size, tokens: Tensor, target: Tensor, microbatches: int, per_rank: int = 1
) -> Contender:
    """torch.distributed.pipelining, with stages cut by hand."""
    rank, stages = dist.get_rank(), RANKS * per_rank
    layers = layers_of(size.build())
    spans = penstock.Plan.uniform(len(layers), stages, schedule="interleaved", stages_per_rank=per_rank).stages
    held = [
        pipelining.PipelineStage(
            nn.Sequential(*layers[spans[index].start : spans[index].stop]), index, stages, torch.device("cpu")
        )
        for index in range(rank, stages, RANKS)
    ]
    schedule = kind(held[0] if per_rank == 1 else held, n_microbatches=microbatches, loss_fn=loss_fn)
    optimizer = sgd([parameter for stage in held for parameter in stage.submod.parameters()])
    inputs = (tokens,) if rank == 0 else ()
    expected = {"target": target} if rank == RANKS - 1 else {}

    def step() -> None:
        schedule.step(*inputs, **expected)
        optimizer.step()
        optimizer.zero_grad()

    return Contender(name, step, ideal_share(microbatches * per_rank))


def penstock_contender(
    schedule: str, size: Size, tokens: Tensor, target: Tensor, microbatches: int, peer: str | None, per_rank: int = 1
) -> Contender:
    pipe = penstock.Pipeline(
        size.build(),
        sample=(tokens[:MICROBATCH_SIZE],),
        loss_fn=loss_fn,
        optimizer=sgd,
        schedule=schedule,
        microbatches=microbatches,
        stages=RANKS * per_rank,
    )
    ideal = ideal_share(microbatches * per_rank) if pipe.schedule.flushes else 1 / RANKS
    return Contender(f"penstock {schedule}", lambda: pipe.step(tokens, target), ideal, peer)


def ideal_share(microbatches: int) -> float:
    """Of a schedule that flushes and does nothing but compute: the bubble is (p - 1) / (m v) of the work."""
    return (1 + (RANKS - 1) / microbatches) / RANKS


def contenders(size: Size, microbatches: int) -> list[Contender]:
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(BYTES, (microbatches * MICROBATCH_SIZE, size.context + 1), generator=generator)
    job = (size, windows[:, :-1], windows[:, 1:], microbatches)
    return [
        alone(*job),
        torch_contender("torch gpipe", pipelining.ScheduleGPipe, *job),
        penstock_contender("gpipe", *job, peer="torch gpipe"),
        torch_contender("torch 1f1b", pipelining.Schedule1F1B, *job),
        penstock_contender("1f1b-flush", *job, peer="torch 1f1b"),
        torch_contender("torch interleaved", pipelining.ScheduleInterleaved1F1B, *job, per_rank=2),
        penstock_contender("interleaved", *job, peer="torch interleaved", per_rank=2),
        penstock_contender("1f1b", *job, peer=None),
        penstock_contender("2bw", *job, peer=None),
    ]


@dataclass(frozen=True, slots=True)
class Times:
    """Of one contender, in milliseconds per step, one for each round."""

    wall: list[float]
    processor: list[float]
    """In this process."""


def measure(ways: Sequence[Contender], repeats: int, steps: int) -> dict[str, Times]:
    """`repeats` rounds, in which every contender takes `steps` steps in its turn."""
    times = {way.name: Times([], []) for way in ways}
    for way in ways:
        for _ in range(WARM_UP_STEPS):
            way.step()
    for _ in range(repeats):
        for way in ways:
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            for _ in range(steps):
                way.step()
            dist.barrier()
            times[way.name].wall.append((time.perf_counter() - wall) / steps * 1e3)
            times[way.name].processor.append((time.process_time() - processor) / steps * 1e3)
    return times


def rows_of(ways: Sequence[Contender], times: dict[str, Times]) -> list[Row]:
    """Medians over the rounds, ratios too: what slows a whole round down leaves its ratios alone. Collective."""
    rows = []
    single = times[ways[0].name].wall
    for way in ways:
        mine = times[way.name].wall
        share = statistics.median(way.ideal * alone / own for alone, own in zip(single, mine, strict=True))
        speedup = None
        if way.peer is not None:
            pairs = zip(times[way.peer].wall, mine, strict=True)
            speedup = statistics.median(theirs / own for theirs, own in pairs)
        processor = torch.tensor(times[way.name].processor, dtype=torch.float64)
        dist.all_reduce(processor)
        spent = statistics.median(processor.tolist())
        rows.append(Row(way.name, statistics.median(mine), min(mine), max(mine), spent, share, speedup))
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'ms per step':24}{'median':>9}{'least':>9}{'most':>9}{'processor':>11}{'of ideal':>10}{'over torch':>12}"
    ]
    for row in rows:
        speedup = "" if row.speedup_over_torch is None else f"{row.speedup_over_torch:.2f}x"
        lines.append(
            f"{row.name:24}{row.median:9.2f}{row.least:9.2f}{row.most:9.2f}{row.processor:11.2f}"
            f"{row.share_of_ideal:10.0%}{speedup:>12}"
        )
    return "\n".join(lines)


def conditions() -> str:
    """The machine, the library and the command, in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"machine: {os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB, {platform.system()}; two "
        f"processes, one thread each, Gloo on loopback; load average before: {os.getloadavg()[0]:.1f}\n"
        f"software: torch {torch.__version__}, Python {platform.python_version()}, penstock {penstock.__version__}\n"
        f"command: torchrun --nproc-per-node {RANKS} benchmarks/schedules.py {shlex.join(sys.argv[1:])}".rstrip()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the model")
    parser.add_argument("--microbatches", type=int, default=8, help=f"of {MICROBATCH_SIZE} samples, in a step")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each contender")
    parser.add_argument("--steps", type=int, default=10, help="steps in a measurement")
    parser.add_argument("--save", type=Path, help="a file for what is printed")
    options = parser.parse_args()

    torch.set_num_threads(1)
    before = conditions()
    dist.init_process_group("gloo")
    if dist.get_world_size() != RANKS:
        parser.error(f"start {RANKS} processes: torchrun --nproc-per-node {RANKS} benchmarks/schedules.py")
    ways = contenders(SIZES[options.size], options.microbatches)
    rows = rows_of(ways, measure(ways, options.repeats, options.steps))
    if dist.get_rank() == 0:
        lines = [json.dumps({"size": options.size, "microbatches": options.microbatches, **asdict(r)}) for r in rows]
        report = "\n".join([before, "", table(rows), "", *lines])
        print(report, flush=True)
        if options.save is not None:
            options.save.write_text(report + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
