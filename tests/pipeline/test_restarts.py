"""Trainings that are killed or asked to leave go on from their checkpoints, and end with the bits of a whole run."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from penstock.runtime.files.step_directories import steps_in
from penstock.testing.faults import FAULTS, Kill, Signal, Slow
from reliability import training
from reliability.elastic import TOLERANCE
from reliability.jobs import Job, run_job
from reliability.kills import Trial, run_trial
from support.paths import BENCHMARKS

pytestmark = pytest.mark.processes


def digest_of(job: Job, directory: Path) -> str:
    """What `job` ends with if nothing happens to it, in this process."""
    per_rank = 2 if job.schedule in ("interleaved", "zb-v") else 1
    training.train(directory / "checkpoints", job.schedule, job.steps, job.save_every, job.ranks * per_rank)
    return training.read_result(directory)["digest"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("job", "kills"),
    [
        (Job(2, "1f1b-flush", steps=6, save_every=2), [Kill(rank=1, step=3, action="B5")]),
        (Job(3, "2bw", steps=6, save_every=2, shared_memory=False), [Kill(rank=0, step=5, action="F2")]),
        (Job(2, "zb-v", steps=6, save_every=2), [Kill(rank=0, path="checkpoints/step-000004")]),
        # In the last save, while it removes an older checkpoint: no other save follows.
        (Job(2, "gpipe", steps=6, save_every=2), [Kill(rank=0, path="checkpoints/.penstock-removed", change=1)]),
        (
            Job(4, "pipedream", steps=6, save_every=2),
            [Kill(rank=3, step=1, action="U"), Kill(rank=2, step=4, restart=1)],
        ),
    ],
    ids=lambda value: value.schedule if isinstance(value, Job) else "",
)
def test_a_killed_training_ends_with_the_bits_of_a_whole_one(job: Job, kills: list[Kill], tmp_path: Path) -> None:
    outcome, wrong = run_trial(Trial(job, tuple(kills)), tmp_path / "killed", digest_of(job, tmp_path / "whole"))

    assert wrong == []
    assert [codes[kill.rank] for kill, codes in zip(kills, outcome.codes, strict=False)] == [-signal.SIGKILL] * len(
        kills
    )
    assert len(outcome.codes) == len(kills) + 1


def test_a_training_goes_on_with_fewer_ranks_after_each_kill(tmp_path: Path) -> None:
    """With another plan each time. The sums over stages have another order, so the end is equal up to rounding."""
    directory, plans = tmp_path / "shrinking", []
    for ranks, killed_at in ((4, 3), (3, 5), (2, None)):
        job = Job(ranks, "1f1b-flush", steps=8, save_every=2)
        faults = [] if killed_at is None else [Kill(rank=ranks - 1, step=killed_at, action="B2")]
        outcome = run_job(job, directory, faults)
        assert outcome.left == []
        assert (outcome.codes[-1][-1], any(outcome.codes[-1])) == (
            (0, False) if not faults else (-signal.SIGKILL, True)
        )
        step, path = max(steps_in(directory / "checkpoints"))
        content = json.loads((path / "manifest.json").read_text())["content"]
        plans.append((step, len(yaml.safe_load(content["plan"])["stages"])))
    whole = run_job(Job(2, "1f1b-flush", steps=8, save_every=2), tmp_path / "whole")

    assert plans == [(2, 4), (4, 3), (8, 2)], "the newest checkpoint of each run, and the stages of its plan"
    assert outcome.result["loss"] == pytest.approx(whole.result["loss"], rel=TOLERANCE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_has_all_save_one_step_and_leave(number: int, tmp_path: Path) -> None:
    job, directory = Job(3, "1f1b-flush", steps=12, save_every=50), tmp_path / "asked"
    # Steps of a third of a second: the other ranks look for a signal four times in a second.
    faults = [Signal(rank=1, step=4, action="F", number=number), Slow(rank=0, action="F", seconds=0.03)]
    outcome = run_job(job, directory, faults, attempts=2)

    assert outcome.codes == [[128 + number] * 3, [0] * 3]
    assert outcome.left == []
    (saved,) = steps_in(directory / "checkpoints")
    resumed, *lines = (directory / "attempt-1-rank-0.log").read_text().splitlines()
    assert resumed.endswith(f"the training goes on after step {saved[0]}")
    first = json.loads(lines[0])
    assert first["step"] == saved[0] + 1 > 5
    assert outcome.result["digest"] == digest_of(job, tmp_path / "whole")


def test_torchrun_starts_a_killed_job_again(tmp_path: Path) -> None:
    """Over the store of torchrun's agent, which still has the addresses of the dead processes."""
    job = Job(2, "1f1b-flush", steps=4, save_every=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    script = [str(BENCHMARKS / "reliability" / "training.py"), str(tmp_path), "--steps", "4", "--save-every", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", FAULTS: "kill rank=1 step=3 action=B2"}
    done = subprocess.run([*command, *script], env=environment, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stderr
    assert re.findall(r'"step": (\d)', done.stdout) == ["1", "2", "3", "3", "4"], "it went on from step 2"
    assert training.read_result(tmp_path)["digest"] == digest_of(job, tmp_path / "whole")
