"""The executor with trainings that are processes: preemption, failures, and its own death."""

import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from penstock import PenstockError, PlanError
from penstock.fleet import FleetExecutor, FleetFile, fifo, max_min_fairness
from penstock.fleet.lease_processes import find_left_behind, training_words
from penstock.fleet.run_states import JobState, RunState, steps_done
from support.paths import ROOT

pytestmark = pytest.mark.processes
TRAINING = str(ROOT / "tests" / "support" / "scripts" / "plain_training.py")


def fleet_file(folder: Path, jobs: str) -> FleetFile:
    path = folder / "fleet.yaml"
    path.write_text(
        f"format: penstock-fleet/1\nkinds:\n- {{name: CPU, workers: 1, price_per_hour: 3.6}}\njobs:\n{jobs}"
    )
    return FleetFile.load(path)


def job(name: str, steps: int, seconds: float, failures: int = 0) -> str:
    words = f'["{TRAINING}", "{{directory}}", "{{steps}}", "{seconds}", "{failures}"]'
    speed = f"throughputs: {{CPU: {1 / seconds}}}"
    return f"- {{name: {name}, steps: {steps}, {speed}, command: {words}, processes: {{CPU: 1}}}}\n"


def result(folder: Path, name: str, steps: int) -> int:
    return int((folder / name / "checkpoints" / f"step-{steps:06}" / "sum").read_text())


def test_jobs_take_turns_and_lose_no_step(tmp_path):
    lines: list[str] = []
    fleet = fleet_file(tmp_path, "".join(job(name, 12, 0.05) for name in "abc"))
    run = FleetExecutor(fleet, max_min_fairness, tmp_path / "run", round_seconds=0.3, report=lines.append).run()
    state = RunState.load(tmp_path / "run" / "state.json", ["a", "b", "c"])

    assert [result(tmp_path / "run", name, 12) for name in "abc"] == [78, 78, 78]
    assert {found.status for found in state.jobs.values()} == {"done"}
    assert sum(found.preemptions for found in state.jobs.values()) >= 1
    assert {job.job.name for job in run.jobs} == {"a", "b", "c"} and run.cost > 0
    # One worker: no two jobs had it at a time.
    spans = sorted((held.start, held.stop) for held in run.held)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert any("lease 2 on CPU [0], 1 processes" in line for line in lines)


def test_a_training_that_fails_is_tried_again(tmp_path):
    fleet = fleet_file(tmp_path, job("a", 3, 0.01, failures=2))
    FleetExecutor(fleet, fifo, tmp_path / "run", round_seconds=0.2).run()

    assert result(tmp_path / "run", "a", 3) == 6
    assert (tmp_path / "run" / "a" / "checkpoints" / "tries").read_text() == "3"


def test_a_training_that_always_fails_is_given_up_and_the_others_are_not(tmp_path):
    fleet = fleet_file(tmp_path, job("bad", 3, 0.01, failures=9) + job("good", 3, 0.01))
    with pytest.raises(PenstockError, match=r"bad: expected that the training ends with exit code 0, found 2 failures"):
        FleetExecutor(fleet, fifo, tmp_path / "run", round_seconds=0.2, most_failures=2).run()

    assert result(tmp_path / "run", "good", 3) == 6


def test_a_killed_executor_goes_on(tmp_path):
    """The training that it leaves behind is found, saves, and goes on; none of its steps is lost or made twice."""
    fleet_file(tmp_path, job("a", 40, 0.05))
    program = (
        "from penstock.fleet import *\n"
        f"fleet = FleetFile.load({str(tmp_path / 'fleet.yaml')!r})\n"
        f"FleetExecutor(fleet, fifo, {str(tmp_path / 'run')!r}, round_seconds=60).run()\n"
    )
    first = subprocess.Popen([sys.executable, "-c", program])
    tries = tmp_path / "run" / "a" / "checkpoints" / "tries"
    while not tries.exists():
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    state = RunState.load(tmp_path / "run" / "state.json", ["a"])
    left = find_left_behind(tmp_path / "run" / "a", state.jobs["a"].lease)

    assert state.jobs["a"].status == "running" and left is not None
    assert find_left_behind(tmp_path / "run" / "a", "another lease") is None
    FleetExecutor(FleetFile.load(tmp_path / "fleet.yaml"), fifo, tmp_path / "run", round_seconds=60).run()
    assert result(tmp_path / "run", "a", 40) == 820
    assert left.exit_code() == -1, "no process of it is left"
    # A run that is done is only read.
    assert FleetExecutor(FleetFile.load(tmp_path / "fleet.yaml"), fifo, tmp_path / "run").run().jobs[0].job.name == "a"


def test_a_training_that_ignores_the_signal_is_killed(tmp_path):
    path = tmp_path / "stubborn.py"
    path.write_text("import signal, time\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\ntime.sleep(600)\n")
    one = f'- {{name: a, steps: 9, throughputs: {{CPU: 1}}, command: ["{path}"], processes: {{CPU: 1}}}}\n'
    fleet = fleet_file(tmp_path, one + one.replace("name: a", "name: b"))
    executor = FleetExecutor(fleet, max_min_fairness, tmp_path / "run", round_seconds=0.3, grace_seconds=0.2)
    ended = []

    def interrupt(line: str) -> None:
        ended.append(line)
        if len(ended) == 3:
            raise KeyboardInterrupt

    executor._report = interrupt
    with pytest.raises(KeyboardInterrupt):
        executor.run()
    state = RunState.load(tmp_path / "run" / "state.json", ["a", "b"])

    assert "a: its lease ended before a step was saved; longer rounds would help" in ended
    assert all(find_left_behind(tmp_path / "run" / name, found.lease) is None for name, found in state.jobs.items())


def test_wrong_runs_are_refused(tmp_path):
    fleet = fleet_file(tmp_path, "- {name: a, steps: 1, throughputs: {CPU: 1}}\n")
    with pytest.raises(PlanError, match="job 'a': command: expected the words that start it"):
        FleetExecutor(fleet, fifo, tmp_path)
    RunState({"a": JobState()}).save(tmp_path / "state.json")
    with pytest.raises(PlanError, match="expected a run of the jobs b, found a"):
        RunState.load(tmp_path / "state.json", ["b"])
    assert steps_done(tmp_path / "nothing") == 0


def test_one_process_needs_no_torchrun():
    assert training_words(["train.py"], 1) == (sys.executable, "train.py")
    assert training_words(["train.py"], 2)[1:5] == ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
