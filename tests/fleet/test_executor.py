"""The executor with trainings that are processes: preemption, failures, and its own death."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from penstock import PenstockError, PlanError
from penstock.fleet import (
    Allocation,
    FleetExecutor,
    FleetFile,
    Job,
    Kind,
    Problem,
    RayNodes,
    fifo,
    max_min_fairness,
    strict_fifo,
)
from penstock.fleet.lease_processes import LOST, Launch, NodeRanks, ThisNode
from penstock.fleet.linear_programs import OutOfReach
from penstock.fleet.run_states import JobState, RunState, number_workers, steps_done
from support.paths import ROOT

pytestmark = pytest.mark.processes
TRAINING = str(ROOT / "tests" / "support" / "scripts" / "plain_training.py")


def fleet_file(folder: Path, jobs: str) -> FleetFile:
    path = folder / "fleet.yaml"
    path.write_text(
        f"format: penstock-fleet/1\nkinds:\n- {{name: CPU, workers: 1, price_per_hour: 3.6}}\njobs:\n{jobs}"
    )
    return FleetFile.load(path)


def job(name: str, steps: int, seconds: float, failures: int = 0, start: object = 0.0, end: float = 0.0) -> str:
    words = f'["{TRAINING}", "{{directory}}", "{{steps}}", "{seconds}", "{failures}", "{start}", "{end}"]'
    speed = f"throughputs: {{CPU: {1 / seconds}}}"
    return f"- {{name: {name}, steps: {steps}, {speed}, command: {words}, processes: {{CPU: 1}}}}\n"


def result(folder: Path, name: str, steps: int) -> int:
    return int((folder / name / "checkpoints" / f"step-{steps:06}" / "sum").read_text())


def test_jobs_take_turns_and_lose_no_step(tmp_path):
    lines: list[str] = []
    # Longer than a busy machine keeps the executor from its rounds: some training is asked before its end.
    fleet = fleet_file(tmp_path, "".join(job(name, 24, 0.05) for name in "abc"))
    run = FleetExecutor(fleet, max_min_fairness, tmp_path / "run", round_seconds=0.3, report=lines.append).run()
    state = RunState.load(tmp_path / "run" / "state.json", ["a", "b", "c"])

    assert [result(tmp_path / "run", name, 24) for name in "abc"] == [300, 300, 300]
    assert {found.status for found in state.jobs.values()} == {"done"}
    assert sum(found.preemptions for found in state.jobs.values()) >= 1
    assert {job.job.name for job in run.jobs} == {"a", "b", "c"} and run.cost > 0
    # One worker: no two jobs had it at a time.
    spans = sorted((held.start, held.stop) for held in run.held)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert any("lease 2 on CPU [0], 1 process" in line for line in lines)


def test_rounds_that_are_shorter_than_a_start_end_nonetheless(tmp_path):
    """A training that is asked before it knows the signal dies of it, and its next leases last longer. The first start
    takes longer than any grace that the executor gives it.
    """
    fleet = fleet_file(tmp_path, "".join(job(name, 5, 0.02, start="first") for name in "ab"))
    # The first program loads the solver, which would make the first round longer than the others.
    max_min_fairness(fleet.problem(fleet.table()))
    lines: list[str] = []
    FleetExecutor(
        fleet, max_min_fairness, tmp_path / "run", round_seconds=0.2, grace_seconds=0.1, report=lines.append
    ).run()
    state = RunState.load(tmp_path / "run" / "state.json", ["a", "b"])

    assert [result(tmp_path / "run", name, 5) for name in "ab"] == [15, 15]
    assert all(found.least_rounds > 1 for found in state.jobs.values())
    assert any("before a step was saved; its next leases last" in line for line in lines)


def test_a_lease_lasts_until_its_training_has_begun(tmp_path):
    """Rounds are shorter than a start, and no start is lost."""
    fleet = fleet_file(tmp_path, "".join(job(name, 40, 0.02, start=0.6) for name in "ab"))
    FleetExecutor(fleet, max_min_fairness, tmp_path / "run", round_seconds=0.1).run()
    state = RunState.load(tmp_path / "run" / "state.json", ["a", "b"])

    assert [result(tmp_path / "run", name, 40) for name in "ab"] == [820, 820]
    assert all(found.least_rounds == 1 for found in state.jobs.values())
    # A lease was asked after its training had begun, and saved a step or more.
    asked = [lease for lease in state.leases if lease.asked is not None]
    assert asked and all(lease.start < lease.begun <= lease.asked <= lease.stop for lease in asked)
    # A signal that meets a training between its last save and its end kills it: it starts once more, with all steps.
    assert all(lease.steps_after > lease.steps_before or lease.steps_before == 40 for lease in state.leases)


def test_a_training_that_is_about_to_leave_is_not_started_again(tmp_path):
    """It has saved all steps, and the signal would kill it: the round waits for it."""
    late = job("b", 2, 0.01).replace("- {name: b,", "- {name: b, arrives: 0.1,")
    fleet = fleet_file(tmp_path, job("a", 2, 0.01, end=1.0) + late)

    def displace(problem):
        """Takes the worker from `a` once it has saved its last step."""
        if len(problem.jobs) == 1:
            return fifo(problem)
        while steps_done(tmp_path / "run" / "a" / "checkpoints") < 2:
            time.sleep(0.01)
        return Allocation(problem, ((0.0,), (1.0,)))

    FleetExecutor(fleet, displace, tmp_path / "run", round_seconds=0.2).run()
    state = RunState.load(tmp_path / "run" / "state.json", ["a", "b"])

    assert [(found.status, found.leases, found.preemptions) for found in state.jobs.values()] == [("done", 1, 0)] * 2


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
    """The training that it leaves behind runs on under the next executor; no step is lost or made twice."""
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
    left = ThisNode().find(launch(state.jobs["a"].lease))

    assert state.jobs["a"].status == "running" and left is not None
    assert ThisNode().find(launch("another lease")) is None
    FleetExecutor(FleetFile.load(tmp_path / "fleet.yaml"), fifo, tmp_path / "run", round_seconds=60).run()
    assert result(tmp_path / "run", "a", 40) == 820
    assert left.exit_code() == LOST, "no process of it is left"
    # It made all of its steps in its first lease. Its exit code is not known, so it started again to leave with 0.
    state = RunState.load(tmp_path / "run" / "state.json", ["a"])
    assert [(lease.steps_before, lease.steps_after) for lease in state.leases] == [(0, 40), (40, 40)]
    assert (state.jobs["a"].status, state.jobs["a"].preemptions, state.jobs["a"].failures) == ("done", 0, 0)
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

    # A round or more, by the load of the machine.
    short = [
        line for line in ended if re.fullmatch(r"a: its lease ended .*; its next leases last \d+ rounds or more", line)
    ]
    assert len(short) == 1
    assert all(ThisNode().find(launch(found.lease)) is None for found in state.jobs.values())


def launch(lease: str, words: Sequence[str] = (), folder: Path = ROOT, processes: int = 1) -> Launch:
    return Launch(lease, words, folder, {}, processes, "CPU", ("this",))


def test_no_process_of_a_lease_is_left(tmp_path):
    """A process in a session of its own ends with the lease, and no other lease's does."""
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import signal, subprocess, sys\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
        "worker = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(tmp_path)!r} + '/' + sys.argv[1], 'w').write(f'{{worker.pid}} ')\nworker.wait()\n"
    )
    node = ThisNode()
    leases = [node.start(launch(name, [str(agent), name], tmp_path)) for name in "ab"]
    while not all((tmp_path / name).exists() and (tmp_path / name).read_text().strip() for name in "ab"):
        time.sleep(0.01)
    workers = {name: Path("/proc", (tmp_path / name).read_text().strip()) for name in "ab"}
    leases[0].ask()
    assert leases[0].exit_code() is None
    leases[0].kill()

    assert leases[0].exit_code() == -signal.SIGKILL
    assert not has_mark(workers["a"], "a") and has_mark(workers["b"], "b")
    # What an executor left is found by its environment, and taken for what it is only if a rank is there.
    found = node.find(launch("b"))
    assert found is not None and found.exit_code() is None
    found.kill()
    leases[1].kill()
    assert found.exit_code() == LOST and not has_mark(workers["b"], "b")


def test_ranks_have_the_variables_of_torchrun(tmp_path):
    """Three ranks are on a node of two workers and a node of one; if one rank fails, the others end."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import json, os, sys, time\nprint(json.dumps({k: v for k, v in os.environ.items() if 'R' in k}), flush=True)\n"
        "sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)\n"
    )
    wide = Launch("x", [str(script)], tmp_path, {}, 3, "GPU", ("one", "two", "one"))
    first, second = wide.parts()
    parts = [NodeRanks(wide, part, ("10.0.0.1", 77)) for part in (first, second)]
    while parts[0].exit_code() is None:
        time.sleep(0.01)

    parts[1].kill()
    assert parts[0].exit_code() == 7
    assert [(part.node, part.workers, list(part.ranks)) for part in (first, second)] == [
        ("one", 2, [0, 1]),
        ("two", 1, [2]),
    ]
    lines = [json.loads(line) for line in (tmp_path / "output.txt").read_text().splitlines()]
    found = next(line for line in lines if line["RANK"] == "1")
    expected = {"LOCAL_RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    assert expected.items() | {("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "77")} <= found.items()


def test_ranks_end_with_what_started_them_and_with_their_lease(tmp_path):
    """On a node of Ray they die with their actor, and end if their job has another lease by now."""
    script = tmp_path / "rank.py"
    script.write_text("import time; time.sleep(600)\n")
    program = (
        "import os\nfrom pathlib import Path\nfrom penstock.fleet.lease_processes import *\n"
        f"launch = Launch('bound', [{str(script)!r}], Path({str(tmp_path)!r}), {{}}, 1, 'CPU', ('this',))\n"
        "NodeRanks(launch, *launch.parts(), bound=True)\nos.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while ThisNode().find(launch("bound")) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ThisNode().find(launch("bound")) is None

    old = launch("old", [str(script)], tmp_path)
    ranks = NodeRanks(old, *old.parts())
    old.note.write_text("new")
    assert ranks.wait() == -signal.SIGKILL


def test_workers_keep_their_nodes():
    kinds = [Kind("GPU", 5), Kind("CPU", 2)]
    first = number_workers(kinds, {}, {"GPU": {"a": 1, "b": 2}, "CPU": {"a": 3}})
    # Node a is gone, b has lost a device, and c has come with more than the file has.
    second = number_workers(kinds, first, {"GPU": {"b": 1, "c": 9}, "CPU": {}})

    assert first == {"GPU": ["a", "b", "b", "", ""], "CPU": ["a", "a"]}
    assert second == {"GPU": ["c", "b", "c", "c", "c"], "CPU": ["", ""]}


def has_mark(entry: Path, lease: str) -> bool:
    """Whether this entry of ``/proc`` is of a process of `lease`."""
    try:
        return f"PENSTOCK_FLEET_LEASE={lease}".encode() in (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def test_a_policy_sees_steps_that_no_checkpoint_has(tmp_path):
    """A job that keeps its lease saves nothing, and is decided about as what it is. A promise that cannot be kept any
    more ends no training.
    """
    later = "".join(job(name, 1, 0.01).replace("{name", f"{{arrives: {at}, name") for name, at in (("b", 1), ("c", 4)))
    fleet = fleet_file(tmp_path, job("a", 100, 0.05) + later)
    seen: list[Job] = []
    lines: list[str] = []
    begun = tmp_path / "run" / "a" / "begun"

    def policy(problem: Problem) -> Allocation:
        seen.extend(problem.jobs)
        if len(problem.jobs) > 1:
            # A busy machine may take seconds to start a's training and make a step, which the next decision sees.
            deadline = time.monotonic() + 120
            while not begun.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            raise OutOfReach("a is late", lambda: strict_fifo(problem))
        return strict_fifo(problem)

    run = FleetExecutor(fleet, policy, tmp_path / "run", round_seconds=0.5, report=lines.append).run()
    own = [found for found in seen if found.name == "a"]

    assert len(run.jobs) == 3 and "a is late. The nearest allocation is taken" in lines
    assert own[0].steps == 100 and own[0].isolated_seconds == 0
    made = 100 - own[-1].steps
    assert made > 0
    # It has been one of one, two or three jobs.
    assert 0.99 * made * 0.05 <= own[-1].isolated_seconds <= 3.01 * made * 0.05


def test_a_promise_that_cannot_be_kept_at_the_start_is_an_error(tmp_path):
    def policy(problem: Problem) -> Allocation:
        raise OutOfReach("a is late", lambda: strict_fifo(problem))

    with pytest.raises(PlanError, match="a is late"):
        FleetExecutor(fleet_file(tmp_path, job("a", 1, 0.01)), policy, tmp_path / "run").run()


def test_wrong_runs_are_refused(tmp_path):
    fleet = fleet_file(tmp_path, "- {name: a, steps: 1, throughputs: {CPU: 1}}\n")
    with pytest.raises(PlanError, match="job 'a': command: expected the words that start it"):
        FleetExecutor(fleet, fifo, tmp_path)
    fleet = fleet_file(tmp_path, job("a", 1, 1.0).replace("{name", "{workers: 2, name"))
    with pytest.raises(PlanError, match="'a': expected a kind that it runs on"):
        FleetExecutor(fleet, fifo, tmp_path)
    RunState({"a": JobState()}).save(tmp_path / "state.json")
    with pytest.raises(PlanError, match="expected a run of the jobs b, found a"):
        RunState.load(tmp_path / "state.json", ["b"])
    assert steps_done(tmp_path / "nothing") == 0
    missing = find_spec("ray") is None
    with pytest.raises(PenstockError, match="found none: install it" if missing else "expected the head of a Ray"):
        RayNodes("127.0.0.1:1")
