"""Trains thousands of steps with a fault every few hundred, and compares the end with an undisturbed training.

    cd benchmarks; python -m reliability.soak --steps 10000 --every 200 --save results/soak.txt

The faults take turns: a kill at an action, an error in a step, an error before a change of a file in a save, a kill in
a save, and a signal. Every fault ends the processes, which start again by themselves. So growth of memory, descriptors
and threads is measured in the undisturbed training, in the same process from the first steps to the last ones.
"""

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measurement.reports import Report, option_parser
from penstock.testing.faults import Fault, Kill, Raise, Signal
from reliability.jobs import Job, run_job
from reliability.kills import judge

__all__ = ["draw_faults", "growth", "main"]

MOST_GROWTH = {"descriptors": 2, "threads": 0, "resident_kilobytes": 16_384}
"""How much of each a process may have more after the last step than after the first tenth of the steps. Kilobytes: the
allocator keeps what it has once used."""


def draw_faults(job: Job, every: int, seed: int) -> list[Fault]:
    """A fault in each run of the job, about `every` steps after the one before."""
    draw = random.Random(seed)
    faults: list[Fault] = []
    for run, step in enumerate(range(every, job.steps, every)):
        rank, action = draw.randrange(job.ranks), draw.choice(["F3", "B7", "U"])
        at_a_save = f"checkpoints/step-{step // job.save_every * job.save_every:06d}"
        kinds: tuple[Fault, ...] = (
            Kill(rank=rank, step=step, action=action, restart=run),
            Raise(rank=rank, step=step, action=action, restart=run),
            Raise(rank=0, path=at_a_save, restart=run),
            Kill(rank=0, path=at_a_save, restart=run),
            Signal(rank=rank, step=step, action=action, restart=run),
        )
        faults.append(kinds[run % len(kinds)])
    return faults


def growth(first: dict[str, int], last: dict[str, int]) -> list[str]:
    """What has grown more than it may."""
    return [
        f"{name} grew from {first[name]} to {last[name]}"
        for name, most in MOST_GROWTH.items()
        if last[name] - first[name] > most
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both trainings and prints what they end with. Returns the number of things that are wrong."""
    parser = option_parser(__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--schedule", default="1f1b-flush")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    job = Job(given.ranks, given.schedule, given.steps, given.save_every)
    faults = draw_faults(job, given.every, given.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole = run_job(job, Path(folder) / "whole")
        assert not any(whole.codes[-1]), whole.errors[-3000:]
        outcome = run_job(job, Path(folder) / "disturbed", faults, attempts=len(faults) + 1)
    wrong = judge(outcome, whole.result["digest"])
    wrong += growth(whole.result["early"], whole.result["late"])
    ended = [code for codes in outcome.codes for code in codes if code]
    Report(given.save).add(
        f"{job.steps} steps of {job.schedule} on {job.ranks} ranks, a save every {job.save_every}",
        f"{len(outcome.codes) - 1} of {len(faults)} faults ended a run; exit codes: "
        + ", ".join(f"{code} ({ended.count(code)} times)" for code in sorted(set(ended))),
        f"a process after the first tenth: {whole.result['early']}, after the last step: {whole.result['late']}",
        "equal to the undisturbed training to the bit, and nothing grew" if not wrong else "WRONG: " + "; ".join(wrong),
    )
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main() > 0)
