"""Times two replicas whose gradients are summed while the backward runs, beside a sum after it and beside torch's DDP.

    torchrun --nproc-per-node 2 benchmarks/overlap.py --size big

All train the GPT of examples/train_gpt.py with plain SGD in the same two processes and take turns, as in schedules.py.
A second table tells which share of the sum lay below the backward that makes the gradients, by the measured timeline.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from schedules import BYTES, MICROBATCH_SIZE, RANKS, SIZES, Contender, Size, alone, conditions, loss_fn, measure, sgd
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import penstock
from penstock.scheduling.actions import Backward, Reduce, parse

DESCRIPTION = "Times two replicas whose gradients are summed while the backward runs, or after it."
OVERLAPPED, AFTERWARDS, DDP = "penstock", "penstock, sum afterwards", "torch DDP"
IDEAL = 1 / RANKS


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one contender, in milliseconds per step."""

    name: str
    median: float
    least: float
    most: float
    share_of_ideal: float
    """Half the time of one process, over this."""
    speedup_over_afterwards: float
    share_below_backward: float | None
    """Of the time from when the first gradients leave until the sum is there."""


def replicated(size: Size, tokens: Tensor, microbatches: int, overlaps: bool) -> penstock.Pipeline:
    """One stage on both ranks."""
    model, sample = size.build(), (tokens[:MICROBATCH_SIZE],)
    layers = len(penstock.capture(model, sample).layers)
    plan = penstock.Plan((penstock.Stage(0, layers, tuple(range(RANKS))),), "1f1b-flush", microbatches)
    pipe = penstock.Pipeline(model, sample, loss_fn, sgd, plan=plan)
    if not overlaps:
        for stages in pipe._stages.values():
            for stage in stages.values():
                assert stage.reducer is not None
                # Without its hooks everything leaves when the backward is over.
                stage.reducer.arm = lambda version, leaves: None  # type: ignore[method-assign]
    return pipe


def data_parallel(size: Size, tokens: Tensor, target: Tensor, microbatches: int) -> Contender:
    """torch's DDP, which sums in the last of a rank's microbatches."""
    model = DistributedDataParallel(size.build())
    optimizer = sgd(list(model.parameters()))
    mine = slice(dist.get_rank(), None, RANKS)
    parts = list(zip(tokens.chunk(microbatches), target.chunk(microbatches), strict=True))[mine]

    def step() -> None:
        for index, (part, expected) in enumerate(parts):
            last = index == len(parts) - 1
            with nullcontext() if last else model.no_sync():
                (loss_fn(model(part), expected) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Contender(DDP, step, IDEAL)


def hidden_shares(pipe: penstock.Pipeline, step: Callable[[], object], steps: int) -> list[float]:
    """Of the sum of each rank in each of some steps, the share that lay below the rank's backward. Collective."""
    shares = []
    for _ in range(steps):
        step()
        spans = pipe.timeline().spans
        for rank in range(RANKS):
            mine = [(parse(span.action), span) for span in spans if span.rank == rank]
            over = max(span.stop_seconds for action, span in mine if isinstance(action, Backward))
            (total,) = [span for action, span in mine if isinstance(action, Reduce)]
            covered = min(over, total.stop_seconds) - total.start_seconds
            shares.append(max(0.0, covered) / total.seconds)
    return shares


def rows_of(size: Size, microbatches: int, repeats: int, steps: int) -> list[Row]:
    """All contenders, in turn."""
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(BYTES, (microbatches * MICROBATCH_SIZE, size.context + 1), generator=generator)
    tokens, target = windows[:, :-1], windows[:, 1:]
    pipes = {
        OVERLAPPED: replicated(size, tokens, microbatches, overlaps=True),
        AFTERWARDS: replicated(size, tokens, microbatches, overlaps=False),
    }
    ways = [
        alone(size, tokens, target, microbatches),
        *(Contender(name, lambda pipe=pipe: pipe.step(tokens, target), IDEAL) for name, pipe in pipes.items()),
        data_parallel(size, tokens, target, microbatches),
    ]
    times = measure(ways, repeats, steps)
    single, after = times[ways[0].name].wall, times[AFTERWARDS].wall
    rows = []
    for way in ways:
        mine = times[way.name].wall
        below = hidden_shares(pipes[way.name], way.step, steps) if way.name in pipes else None
        rows.append(
            Row(
                way.name,
                statistics.median(mine),
                min(mine),
                max(mine),
                statistics.median(way.ideal * one / own for one, own in zip(single, mine, strict=True)),
                statistics.median(other / own for other, own in zip(after, mine, strict=True)),
                None if below is None else statistics.median(below),
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    lines = [
        f"{'ms per step':26}{'median':>9}{'least':>9}{'most':>9}{'of ideal':>10}{'over afterwards':>17}"
        f"{'sum below backward':>20}"
    ]
    for row in rows:
        below = "" if row.share_below_backward is None else f"{row.share_below_backward:.0%}"
        lines.append(
            f"{row.name:26}{row.median:9.2f}{row.least:9.2f}{row.most:9.2f}{row.share_of_ideal:10.0%}"
            f"{row.speedup_over_afterwards:16.2f}x{below:>20}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the model")
    parser.add_argument("--microbatches", type=int, default=4, help=f"of {MICROBATCH_SIZE} samples, over both replicas")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each contender")
    parser.add_argument("--steps", type=int, default=10, help="steps in a measurement")
    parser.add_argument("--save", type=Path, help="a file for what is printed")
    options = parser.parse_args()

    torch.set_num_threads(1)
    machine = conditions().rpartition("command: ")[0]
    before = f"{machine}command: torchrun --nproc-per-node {RANKS} benchmarks/overlap.py {shlex.join(sys.argv[1:])}"
    dist.init_process_group("gloo")
    if dist.get_world_size() != RANKS:
        parser.error(f"start {RANKS} processes: torchrun --nproc-per-node {RANKS} benchmarks/overlap.py")
    rows = rows_of(SIZES[options.size], options.microbatches, options.repeats, options.steps)
    if dist.get_rank() == 0:
        lines = [json.dumps({"size": options.size, "microbatches": options.microbatches, **asdict(r)}) for r in rows]
        report = "\n".join([before.rstrip(), "", table(rows), "", *lines])
        print(report, flush=True)
        if options.save is not None:
            options.save.write_text(report + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
