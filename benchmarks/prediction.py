"""Sets predictions beside measurements: seconds per step and bytes at the peak, every schedule, on 2 to 4 processes.

    python benchmarks/prediction.py

Processes of one machine share its cores, caches and memory, so that a layer takes longer in company than alone, and
longer in a training loop, which streams through memory, than in the profiler, which measures it again and again. Every
round measures both, since the machine's speed moves from minute to minute: a plain loop over all layers in one process,
and over a stage's share in one, two, ... processes that wait for each other after each microbatch. The simulator takes
these factors (`slowdowns`), a profile that was taken while the others slept, the seconds of an update, and the probed
links. Nothing is fitted to the steps of a pipeline.

Seconds: medians over rounds, in which every schedule takes its turn, the ratio's too; the pipe of an asynchronous
schedule is full in the steps that count. Bytes: what the process has resident at most in a step, less what it had
resident before it trained, plus the weights, which are there before; so what Python and PyTorch take for themselves
does not count. That is measured in a launch of its own, with larger microbatches, in which freed tensors go back to the
system at once (MALLOC_MMAP_THRESHOLD_): resident bytes are then those of live tensors, and steps take longer.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import penstock
from contenders.contenders import pipeline, stages_per_rank
from contenders.jobs import MICROBATCH_SIZE, Language, Placed, Setting, plain_microbatch, sgd
from measurement.launches import alone, everywhere, launch, timed
from measurement.resident_memory import ALLOCATOR, forget_peak, own_bytes
from measurement.slowdowns import groups_up_to, seconds_in_company
from penstock.capturing import capture
from penstock.simulating import evaluate

SCHEDULES = ("gpipe", "1f1b-flush", "interleaved", "spp", "pipedream", "2bw")
JOB = Language(width=256, heads=8, blocks=12, context=128)
LARGE_SIZE = 8
"""Samples of a microbatch where memory is measured; elsewhere there are `MICROBATCH_SIZE`."""
MICROBATCHES_PER_PROCESS = 4
WARM_UP_STEPS = 2
BUSY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule on a number of processes; the bytes are those of the rank where the prediction is off the most."""

    processes: int
    schedule: str
    predicted_seconds: float
    measured_seconds: float
    ratio: float
    least_seconds: float
    most_seconds: float
    rank: int
    predicted_bytes: float
    measured_bytes: float

    def text(self) -> str:
        size = self.predicted_bytes / self.measured_bytes
        return (
            f"{self.processes:>9}  {self.schedule:<12}{1e3 * self.predicted_seconds:>10.1f}"
            f"{1e3 * self.measured_seconds:>10.1f}  ({1e3 * self.least_seconds:.1f} to {1e3 * self.most_seconds:.1f})"
            f"{self.ratio:>8.3f}{self.rank:>8}{self.predicted_bytes / 1e6:>11.1f}{self.measured_bytes / 1e6:>10.1f}"
            f"{size:>8.3f}"
        )


HEAD = (
    f"{'processes':>9}  {'schedule':<12}{'predicted':>10}{'measured':>10}  (least to most) ms{'ratio':>5}{'rank':>8}"
    f"{'predicted':>11}{'measured':>10}{'ratio':>8} MB"
)


def setting_of(processes: int, samples: int = MICROBATCH_SIZE) -> Setting:
    """The training on `processes` processes, with `samples` in a microbatch."""
    return Setting(Placed(JOB, torch.device("cpu"), samples), processes, MICROBATCHES_PER_PROCESS * processes)


def pipeline_of(schedule: str, setting: Setting) -> penstock.Pipeline:
    return pipeline(setting, schedule=schedule, stages=setting.processes * stages_per_rank(schedule))


def measure_profile(setting: Setting, iterations: int, warmup: int) -> penstock.Profile:
    """The profile of the model with its loss, for the microbatches of `setting`."""
    tokens, target = setting.job.batch(1)
    options = {"optimizer": sgd, "iterations": iterations, "warmup": warmup}
    return penstock.profile(JOB.build(), (tokens,), loss_fn=JOB.loss, target=target, **options)


def measure_slowdowns(seconds: float, groups: Sequence[dist.ProcessGroup | None]) -> tuple[float, ...]:
    """How many times `seconds`, the profile's, a microbatch takes when 1, 2, ... processes are busy.

    Two things that are measured apart: a plain loop over the whole model in one process, and how much longer a stage's
    share takes in company. `groups`: of the first 1, 2, ... processes.
    """
    tokens, target = JOB.batch(1)
    # The layers that the profile is of, and a pipeline runs: they are traced, and quicker than the model's own modules.
    chain = capture(JOB.build(), (tokens,), check=False)
    whole, (name,) = chain.stage(0, len(chain.layers)), chain.inputs.names
    streaming = alone(lambda: timed(lambda: JOB.loss(*whole((), {name: tokens}), target).backward(), BUSY_SECONDS))
    streaming /= seconds
    together = seconds_in_company(plain_microbatch(JOB.share(len(groups))), groups, BUSY_SECONDS)
    return tuple(streaming * one / together[0] for one in together)


def measure_peak(pipe: penstock.Pipeline, tokens: Tensor, target: Tensor) -> float:
    """The most bytes of live tensors in a step, in this process; see the file's docstring."""
    # What is made once for all steps, such as the workspaces of kernels, is made by a microbatch before.
    pipe.evaluate(tokens[:LARGE_SIZE], target[:LARGE_SIZE])
    gc.collect()
    before = own_bytes("VmRSS")
    weights = sum(4 * parameter.numel() for parameter in pipe.parameters())
    for _ in range(WARM_UP_STEPS):
        pipe.step(tokens, target)
    forget_peak()
    for _ in range(2):
        pipe.step(tokens, target)
    peak = own_bytes("VmHWM")
    pipe.drain()
    return peak - before + weights


def measure_steps(
    pipes: dict[str, penstock.Pipeline], rounds: int, seconds: float, tokens: Tensor, target: Tensor
) -> tuple[list[tuple[float, ...]], dict[str, list[float]]]:
    """The factors for busy processes of each round, and every schedule's seconds per step, as rank 0 sees them."""
    times: dict[str, list[float]] = {name: [] for name in pipes}
    factors = []
    groups = groups_up_to(dist.get_world_size())
    for _ in range(rounds):
        factors.append(measure_slowdowns(seconds, groups))
        for name, pipe in pipes.items():
            dist.barrier()
            marks = []
            for _ in range(WARM_UP_STEPS + 3):
                pipe.step(tokens, target)
                marks.append(time.perf_counter())
            pipe.drain()
            times[name].append((marks[-1] - marks[-4]) / 3)
    return factors, times


def measure_peaks() -> dict[str, tuple[int, float, float]]:
    """By schedule: the rank where the prediction is off the most, and its bytes, predicted and measured. Collective."""
    processes = dist.get_world_size()
    setting = setting_of(processes, LARGE_SIZE)
    batch = setting.job.batch(setting.microbatches)
    profile = alone(lambda: measure_profile(setting, iterations=1, warmup=1))
    peaks = {}
    for name in SCHEDULES:
        with closing(pipeline_of(name, setting)) as pipe:
            measured = everywhere(measure_peak(pipe, *batch))
            cluster = penstock.Cluster.uniform(processes, 1e10)
            predicted = evaluate(pipe.plan, profile, cluster, optimizer_copies=0.0).peak_bytes
        ratios = [abs(guess / truth - 1) for guess, truth in zip(predicted, measured, strict=True)]
        rank = ratios.index(max(ratios))
        peaks[name] = rank, predicted[rank], measured[rank]
    return peaks


def measure_times(rounds: int, peaks: dict[str, tuple[int, float, float]]) -> list[Row]:
    """The rows of this number of processes. Collective; the same on every rank."""
    processes = dist.get_world_size()
    setting = setting_of(processes)
    profile = alone(lambda: measure_profile(setting, iterations=20, warmup=2))
    cluster = penstock.probe()
    pipes = {name: pipeline_of(name, setting) for name in SCHEDULES}
    factors, times = everywhere(
        measure_steps(pipes, rounds, profile.seconds, *setting.job.batch(setting.microbatches))
    )[0]
    if dist.get_rank() == 0:
        reported = "; ".join(", ".join(f"{factor:.2f}" for factor in found) for found in factors)
        print(
            f"{processes} processes: {reported} times the profile's seconds with 1, 2, ... busy, by round", flush=True
        )
    rows = []
    for name, pipe in pipes.items():
        predicted = [evaluate(pipe.plan, profile, cluster, slowdowns=found).minibatch_seconds for found in factors]
        ratio = statistics.median(guess / truth for guess, truth in zip(predicted, times[name], strict=True))
        middle = statistics.median(predicted), statistics.median(times[name])
        rows.append(Row(processes, name, *middle, ratio, min(times[name]), max(times[name]), *peaks[name]))
    return rows


def work(rounds: int, folder: Path) -> None:
    """One process of a launch: finds the peaks, or if they are there already the times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    peaks, rows = folder / "peaks.json", folder / "rows.json"
    if not peaks.exists():
        found: object = measure_peaks()
        path = peaks
    else:
        found, path = [asdict(row) for row in measure_times(rounds, json.loads(peaks.read_text()))], rows
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(processes: int, rounds: int) -> list[Row]:
    """The rows that worlds of `processes` processes measure."""
    with tempfile.TemporaryDirectory() as folder:
        for environment in (ALLOCATOR, {}):
            launch(__file__, processes, ["--worker", folder, "--rounds", str(rounds)], environment)
        return [Row(**row) for row in json.loads((Path(folder) / "rows.json").read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.rounds, arguments.worker)
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}", flush=True)
    rows = [row for processes in arguments.processes for row in measure(processes, arguments.rounds)]
    print(HEAD)
    for row in rows:
        print(row.text())
    worst = max(abs(row.ratio - 1) for row in rows)
    fullest = max(abs(row.predicted_bytes / row.measured_bytes - 1) for row in rows)
    print(f"seconds are off by at most {worst:.1%}, bytes by at most {fullest:.1%}")


if __name__ == "__main__":
    main()
