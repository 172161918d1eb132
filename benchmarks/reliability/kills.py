"""Kills trainings at random actions and in random moments of saves, and compares what the resumed runs end with.

    cd benchmarks; python -m reliability.kills --kills 100 --save results/kills.txt

Each job has one schedule, 2, 3 or 4 ranks, and shared memory or sockets between them. It is killed (SIGKILL of one
rank) once or several times, is started again by itself after each kill, and must end with the weights of the same job
without a kill, to the bit. Nothing may be left behind: no file of a save, no shared memory and no socket.
"""

import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from measurement.reports import Report, option_parser
from penstock.testing.faults import Fault, Kill
from reliability import training
from reliability.jobs import Job, Outcome, run_job

__all__ = ["Trial", "draw_trials", "judge", "main", "run_trial"]

SCHEDULES = ("gpipe", "1f1b-flush", "interleaved", "spp", "zb-h1", "zb-v", "pipedream", "2bw")
SPLIT = ("zb-h1", "zb-v")
RANKS = (2, 3, 4)
STEPS, SAVE_EVERY = 12, 3
KILLS_IN_A_JOB = 2


@dataclass(frozen=True, slots=True)
class Trial:
    """A job and its kills, one in each attempt."""

    job: Job
    kills: tuple[Fault, ...]


def draw_trials(kills: int, seed: int) -> Iterator[Trial]:
    """Trials with `kills` in all: every schedule, number of ranks and transport in turn."""
    draw, number = random.Random(seed), 0
    while kills > 0:
        job = Job(
            ranks=RANKS[number % len(RANKS)],
            schedule=SCHEDULES[number % len(SCHEDULES)],
            steps=STEPS,
            save_every=SAVE_EVERY,
            shared_memory=number // len(SCHEDULES) % 2 == 0,
        )
        count = min(kills, KILLS_IN_A_JOB)
        yield Trial(job, tuple(draw_kill(draw, job, attempt) for attempt in range(count)))
        kills, number = kills - count, number + 1


def draw_kill(draw: random.Random, job: Job, attempt: int) -> Fault:
    """A kill at a random action of a random step, or, one time in three, before a random change of a file in a save."""
    if draw.random() < 1 / 3:
        # Rank 0 also makes, renames and removes directories.
        rank = draw.choice([0, draw.randrange(job.ranks)])
        return Kill(rank=rank, path="checkpoints", change=draw.randrange(9 if rank == 0 else 4), restart=attempt)
    kind = draw.choice(["F", "B", "I", "W", "U", "R", "S", ""])
    # A schedule with split backwards has no B, and the others no I and W. Then the process is not killed.
    kind = {"B": "I", "": "W"}.get(kind, kind) if job.schedule in SPLIT else {"I": "B", "W": "F"}.get(kind, kind)
    number = str(draw.randrange(training.MICROBATCHES)) if kind in "FBIW" and kind else ""
    step = draw.randrange(1 + attempt * SAVE_EVERY, STEPS)
    return Kill(rank=draw.randrange(job.ranks), step=step, action=kind + number or None, restart=attempt)


def run_trial(trial: Trial, directory: Path, expected: str) -> tuple[Outcome, list[str]]:
    """Runs the job with its kills. Returns what came of it, and what is wrong with that."""
    outcome = run_job(trial.job, directory, trial.kills, attempts=len(trial.kills) + 1)
    return outcome, judge(outcome, expected)


def judge(outcome: Outcome, expected: str) -> list[str]:
    """What is wrong with a run that should have ended with the digest `expected`."""
    wrong = [f"left behind: {path}" for path in outcome.left]
    if any(outcome.codes[-1]):
        wrong.append(f"the last attempt ended with {outcome.codes[-1]}:\n{outcome.errors}")
    elif outcome.result.get("digest") != expected:
        wrong.append(f"expected the weights {expected}, found {outcome.result.get('digest')}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the campaign and prints a line for each job. Returns the number of jobs that went wrong."""
    parser = option_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    report = Report(given.save)
    endings: dict[str, list[float]] = {"shared memory": [], "sockets": []}
    expected: dict[tuple[int, str], str] = {}
    made = bad = jobs = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, trial in enumerate(draw_trials(given.kills, given.seed)):
            job, place = trial.job, (trial.job.ranks, trial.job.schedule)
            if place not in expected:
                # The transport changes no number.
                whole = run_job(job, Path(folder) / f"{number}-whole")
                assert not any(whole.codes[-1]), whole.errors[-3000:]
                expected[place] = whole.result["digest"]
            outcome, wrong = run_trial(trial, Path(folder) / str(number), expected[place])
            killed = sum(-9 in codes for codes in outcome.codes)
            made, bad, jobs = made + killed, bad + bool(wrong), jobs + 1
            transport = "shared memory" if job.shared_memory else "sockets"
            endings[transport] += outcome.ending_seconds
            kills = "; ".join(map(str, trial.kills))
            verdict = "equal to the bit" if not wrong else "WRONG: " + "; ".join(wrong)
            report.add(f"{job.schedule:11} {job.ranks} ranks, {transport}: {killed} killed ({kills}): {verdict}")
    for transport, seconds in endings.items():
        if seconds:
            report.add(
                f"{transport}: {statistics.median(seconds):.1f} s from a kill to the end of the last other process "
                f"(median of {len(seconds)}; at most {max(seconds):.1f} s)"
            )
    report.add(f"{made} kills in {jobs} jobs, of which {bad} went wrong")
    return bad


if __name__ == "__main__":
    sys.exit(main() > 0)
