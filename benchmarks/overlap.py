"""Times two replicas whose gradients are summed while the backward runs, beside a sum after it and beside torch's DDP.

    python benchmarks/overlap.py --size big

All train the GPT of examples/train_gpt.py with plain SGD in the same two processes and take turns, as in throughput.py.
A second table tells which share of the sum lay below the backward that makes the gradients, by the measured timeline.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import penstock
from contenders.contenders import ONE_PROCESS, Entry, Running, data_parallel, pipeline, plain_loop, running_pipeline
from contenders.jobs import JOBS, Setting
from measurement.ideals import speedup
from measurement.launches import conditions, launch
from measurement.rounds import TURN_SECONDS, joined, measure
from penstock.scheduling.actions import Backward, Reduce, parse

RANKS = 2
WATCHED_STEPS = 10
OVERLAPPED, AFTERWARDS = "penstock", "penstock, sum afterwards"


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


def replicated(name: str, overlaps: bool) -> Entry:
    """Penstock with one stage on both ranks."""

    def build(setting: Setting) -> Running:
        layers = setting.job.cuts(1)[-1]
        plan = penstock.Plan((penstock.Stage(0, layers, tuple(range(RANKS))),), "1f1b-flush", setting.microbatches)
        pipe = pipeline(setting, plan=plan)
        if not overlaps:
            for stages in pipe._engine.stages.values():
                for stage in stages.values():
                    assert stage.reducer is not None
                    # Without its hooks everything leaves when the backward is over.
                    stage.reducer.arm = lambda version: None  # type: ignore[method-assign]
        return running_pipeline(pipe, setting)

    return Entry(name, build)


def hidden_shares(replicas: Running, steps: int) -> list[float]:
    """The share of each rank's sum, in each of `steps` steps, that lay below the rank's backward. Collective."""
    shares = []
    assert replicas.pipe is not None
    for _ in range(steps):
        replicas.step()
        spans = replicas.pipe.timeline().spans
        for rank in range(RANKS):
            mine = [(parse(span.action), span) for span in spans if span.rank == rank]
            over = max(span.stop_seconds for action, span in mine if isinstance(action, Backward))
            (total,) = [span for action, span in mine if isinstance(action, Reduce)]
            covered = min(over, total.stop_seconds) - total.start_seconds
            shares.append(max(0.0, covered) / total.seconds)
    return shares


def rows_of(
    names: list[str], running: Mapping[str, Running], setting: Setting, rounds: int, turn_seconds: float
) -> list[Row]:
    """All contenders, in turn. Collective."""
    times = {name: taken.wall for name, taken in measure(names, running, setting, rounds, turn_seconds).times.items()}
    half = [seconds / RANKS for seconds in times[ONE_PROCESS]]
    rows = []
    for name in names:
        own = times[name]
        below = hidden_shares(running[name], WATCHED_STEPS) if name in (OVERLAPPED, AFTERWARDS) else None
        milliseconds = (1e3 * statistics.median(own), 1e3 * min(own), 1e3 * max(own))
        rows.append(
            Row(
                name,
                *milliseconds,
                1.0 if name == ONE_PROCESS else speedup(half, own),
                speedup(times[AFTERWARDS], own),
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


def work(options: argparse.Namespace) -> None:
    """One process of the launch: writes the rows."""
    torch.set_num_threads(1)
    setting = Setting(JOBS[options.size], RANKS, options.microbatches)
    ddp = data_parallel(setting)
    assert isinstance(ddp, Entry), "the microbatches of overlap.py divide by its processes"
    entries = [plain_loop(), replicated(OVERLAPPED, True), replicated(AFTERWARDS, False), ddp]
    with joined(entries, setting) as running:
        rows = rows_of([entry.name for entry in entries], running, setting, options.repeats, options.turn_seconds)
        if dist.get_rank() == 0:
            options.worker.write_text(json.dumps([asdict(row) for row in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=JOBS, default="tiny", help="of the model")
    parser.add_argument("--microbatches", type=int, default=4, help="of two samples, over both replicas; even")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each contender")
    parser.add_argument("--turn-seconds", type=float, default=TURN_SECONDS, help="of a measurement")
    parser.add_argument("--save", type=Path, help="a file for what is printed")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return
    before = conditions("benchmarks/overlap.py")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        arguments = ["--size", options.size, "--microbatches", str(options.microbatches), "--worker", str(found)]
        launch(
            __file__,
            RANKS,
            [*arguments, "--repeats", str(options.repeats), "--turn-seconds", str(options.turn_seconds)],
        )
        rows = [Row(**row) for row in json.loads(found.read_text())]
    lines = [json.dumps({"size": options.size, "microbatches": options.microbatches, **asdict(r)}) for r in rows]
    report = "\n".join([before, "", table(rows), "", *lines])
    print(report, flush=True)
    if options.save is not None:
        options.save.write_text(report + "\n")


if __name__ == "__main__":
    main()
