"""The executor of `penstock fleet run`, measured: bits after preemptions and after its own death, and its makespan.

    python benchmarks/fleet_runs.py --save benchmarks/results/fleet-runs.txt
    python benchmarks/fleet_runs.py --kill-after 200
    python benchmarks/fleet_runs.py --ray 3 --kill-after 200 --save benchmarks/results/fleet-ray.txt
    python benchmarks/fleet_runs.py --shares 120 --round-seconds 20 --save benchmarks/results/fleet-ray.txt

Five trainings on two emulated kinds, of two processes and of one. Both kinds are this machine, so a kind also has a
time that a step takes at least. With --kill-after the executor is killed in the midst of the run and started again. The
trainings run on meanwhile, so the prediction is the same.

The makespan is predicted before the run: a lease of a training on each kind, both kinds at a time, gives its steps per
second and the seconds of a start and of an end, and the simulator does the rest. After the run every lease is listed,
and the simulator is asked again with what the leases of the run took: what that prediction still misses is not due to
the three numbers. The program ends with an error if any training ends with other weights than one that nothing
interrupted, to the bit, or if fewer than ten were preempted.

With --ray that many nodes of Ray run on this machine: one of `single`, the others of `double`. Of three, two of the
jobs have ranks on both nodes of `double`. One node of `double` is killed, and a new one comes. --shares compares the
time that three jobs without a model have on each of two nodes, over that many rounds, with the simulation.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from measurement.reports import Report, conditions, option_parser
from penstock.fleet import POLICIES, FleetFile, Held, simulate_fleet
from penstock.fleet.lease_processes import THIS_NODE, Launch, LeaseProcesses, ThisNode
from penstock.fleet.run_states import LeaseRecord, RunState
from penstock.values.quantities import table_lines

ROOT = Path(__file__).parents[1]
PROCESSES = {"double": 2, "single": 1}
PACES = {"double": 0.1, "single": 0.2}
"""The seconds that a step takes at least on each kind."""
FIRST_AND_LAST = (50, 200)
"""The steps between which a kind is measured before the run."""
STEPS = {"a": 1000, "b": 1400, "c": 1200, "d": 800, "e": 1000}


@dataclass(frozen=True, slots=True)
class Measured:
    """What leases of trainings say about a kind."""

    steps_per_second: float
    start_seconds: float
    end_seconds: float

    def __str__(self) -> str:
        return (
            f"{self.steps_per_second:.3g} steps/s, a start {self.start_seconds:.1f} s, an end {self.end_seconds:.1f} s"
        )


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--round-seconds", type=float, default=40.0)
    parser.add_argument("--grace-seconds", type=float, default=120.0)
    parser.add_argument("--policy", choices=list(POLICIES), default="max-min-fairness")
    parser.add_argument("--steps", type=float, default=1.0, help="times those of the five jobs")
    parser.add_argument("--kill-after", type=float, default=0.0, help="seconds until the executor is killed; 0: never")
    parser.add_argument("--ray", type=int, choices=(2, 3), help="nodes of Ray, of which one is killed")
    parser.add_argument("--shares", type=int, metavar="ROUNDS", help="compare shares of time with the simulation")
    arguments = parser.parse_args()
    report = Report(arguments.save).add
    report(conditions("benchmarks/fleet_runs.py"))
    report(f"rounds of {arguments.round_seconds:g} s, {arguments.policy}")
    if arguments.ray or arguments.shares:
        with tempfile.TemporaryDirectory() as name:
            wrong = _shares(Path(name), arguments, report) if arguments.shares else _ray(Path(name), arguments, report)
        sys.exit(wrong)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measured = _measure(folder)
        for kind, found in measured.items():
            report(f"before the run, {kind}: {found}")
        fleet = FleetFile.load(_fleet_file(folder, arguments.steps, measured))
        expected = _predict(fleet, measured, arguments)
        report(f"predicted: a makespan of {expected:.0f} s")
        seconds = _run(folder, arguments)
        state = RunState.load(folder / "run" / "state.json", [model.job.name for model in fleet.jobs])
        preempted = sum(job.preemptions for job in state.jobs.values())
        report(
            f"measured: {seconds:.0f} s; the prediction differs by {expected / seconds - 1:+.1%}; "
            f"{sum(job.leases for job in state.jobs.values())} leases, {preempted} preempted; load {_load()}"
        )
        report(*_table_of_leases(state.leases))
        found = _of_leases(state.leases)
        for kind, of_run in found.items():
            report(f"in the run, {kind}: {of_run}")
        again = _predict(fleet, found, arguments)
        report(f"predicted from these: {again:.0f} s, which differs by {again / seconds - 1:+.1%}")
        wrong = _compare(fleet, folder)
    report(f"other bits than without interruptions: {', '.join(wrong) or 'none'}")
    if wrong or preempted < 10:
        sys.exit("expected ten preemptions or more, and the bits of uninterrupted trainings")


def _load() -> str:
    return "/".join(f"{load:.1f}" for load in os.getloadavg())


def _predict(fleet: FleetFile, measured: dict[str, Measured], arguments: argparse.Namespace) -> float:
    """The simulated makespan."""
    # The kinds exchange their jobs, so a start waits for the slowest end.
    end = max(found.end_seconds for found in measured.values())
    speeds = tuple(measured[kind.name].steps_per_second for kind in fleet.kinds)
    expected = simulate_fleet(
        [replace(arrival, throughputs=speeds) for arrival in fleet.workload(fleet.table())],
        fleet.kinds,
        POLICIES[arguments.policy],
        round_seconds=arguments.round_seconds,
        restart_seconds={kind: end + found.start_seconds for kind, found in measured.items()},
    )
    return expected.makespan


def _table_of_leases(leases: Sequence[LeaseRecord]) -> list[str]:
    rows = [("lease", "kind", "from", "start", "steps", "steps/s", "end", "to")]
    for lease in leases:
        assert lease.stop is not None, "the run is over"
        start = "-" if lease.begun is None else f"{lease.begun - lease.start:.1f}"
        steps = lease.steps_after - lease.steps_before
        speed = "-" if lease.begun is None or not steps else f"{_speed(lease):.2f}"
        end = "-" if lease.asked is None else f"{lease.stop - lease.asked:.1f}"
        rows.append((lease.job, lease.kind, f"{lease.start:.0f}", start, f"{steps}", speed, end, f"{lease.stop:.0f}"))
    return table_lines(rows, left={0, 1})


def _speed(lease: LeaseRecord) -> float:
    """Steps per second from the first step to the last one. A training that is asked still makes a step or two."""
    assert lease.begun is not None and lease.stop is not None, "it has trained, and the run is over"
    seconds = (lease.stop if lease.asked is None else lease.asked) - lease.begun
    return (lease.steps_after - lease.steps_before - 1) / max(seconds, 1e-9)


def _of_leases(leases: Sequence[LeaseRecord]) -> dict[str, Measured]:
    """The means of the leases on each kind: of those that were asked, which all have a start, steps and an end."""
    found = {}
    for kind in PROCESSES:
        begun = [(lease, lease.begun) for lease in leases if lease.kind == kind and lease.begun is not None]
        ends = [lease.stop - lease.asked for lease, _ in begun if lease.stop is not None and lease.asked is not None]
        found[kind] = Measured(
            statistics.mean(_speed(lease) for lease, _ in begun if lease.asked is not None),
            statistics.mean(first - lease.start for lease, first in begun),
            statistics.mean(ends),
        )
    return found


def _measure(folder: Path) -> dict[str, Measured]:
    """A lease on each kind, both at a time: when it reports its steps says how fast it is and when it began."""

    def lease(kind: str) -> Measured:
        place = folder / "before" / kind
        place.mkdir(parents=True)
        words = [*_words("0"), str(place / "checkpoints"), str(10**9)]
        began = time.monotonic()
        environment = {"PENSTOCK_FLEET_KIND": kind, "OMP_NUM_THREADS": "1"}
        process = ThisNode().start(
            Launch(str(place), words, place, environment, PROCESSES[kind], kind, nodes=(THIS_NODE,))
        )
        first, last = (_when(place / "output.txt", step, process) - began for step in FIRST_AND_LAST)
        asked = time.monotonic()
        process.ask()
        while process.exit_code() is None:
            time.sleep(0.05)
        speed = (FIRST_AND_LAST[1] - FIRST_AND_LAST[0]) / (last - first)
        return Measured(speed, first - FIRST_AND_LAST[0] / speed, time.monotonic() - asked)

    with ThreadPoolExecutor() as pool:
        return dict(zip(PROCESSES, pool.map(lease, PROCESSES), strict=True))


def _when(output: Path, step: int, process: LeaseProcesses) -> float:
    """The time at which a training reports this step."""
    while f"step {step}:" not in output.read_text():
        if process.exit_code() is not None:
            sys.exit(f"expected a training that reports step {step}, found one that ended: {output.read_text()}")
        time.sleep(0.05)
    return time.monotonic()


def _words(seed: str) -> list[str]:
    paces = [f"{kind}={pace}" for kind, pace in PACES.items()]
    return [str(ROOT / "examples" / "fleet" / "train.py"), "--seed", seed, "--step-seconds", *paces, "--"]


def _fleet_file(folder: Path, factor: float, measured: dict[str, Measured]) -> Path:
    jobs = [
        {
            "name": name,
            "steps": int(steps * factor),
            "throughputs": {kind: found.steps_per_second for kind, found in measured.items()},
            "processes": PROCESSES,
            "command": [*_words(str(seed)), "{directory}", "{steps}"],
        }
        for seed, (name, steps) in enumerate(STEPS.items())
    ]
    path = folder / "fleet.yaml"
    kinds = [{"name": kind, "workers": 1} for kind in PROCESSES]
    path.write_text(yaml.safe_dump({"format": "penstock-fleet/1", "kinds": kinds, "jobs": jobs}))
    return path


def _command(folder: Path, arguments: argparse.Namespace, *more: str) -> list[str]:
    options = ["--round-seconds", str(arguments.round_seconds), "--grace-seconds", str(arguments.grace_seconds)]
    words = ["fleet", "run", str(folder / "fleet.yaml"), "--policy", arguments.policy, "-d", str(folder / "run")]
    return [sys.executable, "-m", "penstock", *words, *options, *more]


def _run(folder: Path, arguments: argparse.Namespace, *more: str) -> float:
    """Runs the fleet, with an executor that is killed and its successor; the seconds from the first to the end."""
    command = _command(folder, arguments, *more)
    began = time.monotonic()
    if arguments.kill_after:
        first = subprocess.Popen(command, cwd=ROOT)
        try:
            first.wait(arguments.kill_after)
        except subprocess.TimeoutExpired:
            first.kill()
            first.wait()
            print(f"killed the executor after {arguments.kill_after} s", flush=True)
    subprocess.run(command, cwd=ROOT, check=True)
    return time.monotonic() - began


def _compare(fleet: FleetFile, folder: Path) -> list[str]:
    """The jobs whose weights differ from those of an uninterrupted training in one process, which needs no pace."""
    wrong = []
    for model, command in zip(fleet.jobs, fleet.commands, strict=True):
        assert command is not None
        alone = folder / "alone" / model.job.name / "checkpoints"
        subprocess.run([sys.executable, *command.filled(alone, model.job.steps, 1)], check=True)
        found, expected = (
            json.loads((place / model.job.name / "result.json").read_text())
            for place in (folder / "run", folder / "alone")
        )
        same = found["digest"] == expected["digest"] and found["steps"] == expected["steps"] == model.job.steps
        print(f"{model.job.name}: {'the same bits' if same else 'OTHER BITS'}", flush=True)
        wrong += [] if same else [model.job.name]
    return wrong


def _cluster(*kinds: str) -> tuple[Any, list[Any]]:
    """A head of Ray on this machine, and a node with a device of each of `kinds`."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = _patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
    return cluster, [_add_node(cluster, kind) for kind in kinds]


def _add_node(cluster: Any, kind: str) -> Any:
    return _patiently(lambda: cluster.add_node(num_cpus=0, resources={kind: 1}))


def _patiently(start: Callable[[], Any]) -> Any:
    """Tries again where Ray starts no node in 30 seconds, as on a busy machine."""
    for _ in range(20):
        try:
            return start()
        except Exception as error:
            print(f"a node did not start: {error}", flush=True)
    sys.exit("expected a node of Ray, found none that starts in 30 s: try again on a quieter machine")


def _ray(folder: Path, arguments: argparse.Namespace, report: Callable[..., None]) -> str | None:
    """The five trainings on nodes of which one is killed. What is wrong, if anything is."""
    doubles = arguments.ray - 1
    path = _fleet_file(folder, arguments.steps, {kind: Measured(1 / pace, 0, 0) for kind, pace in PACES.items()})
    document = yaml.safe_load(path.read_text())
    document["kinds"][0]["workers"] = doubles
    for job in document["jobs"][:2]:
        job["workers"] = doubles
    path.write_text(yaml.safe_dump(document))
    cluster, nodes = _cluster("single", *["double"] * doubles)
    with ThreadPoolExecutor() as pool:
        # Ray starts nodes in the main thread only.
        run = pool.submit(_run, folder, arguments, "--ray", cluster.address)
        time.sleep(1.5 * arguments.round_seconds)
        cluster.remove_node(nodes[-1], allow_graceful=False)
        print("killed a node of double", flush=True)
        time.sleep(arguments.round_seconds)
        _add_node(cluster, "double")
        seconds = run.result()
    cluster.shutdown()
    fleet = FleetFile.load(path)
    state = RunState.load(folder / "run" / "state.json", [model.job.name for model in fleet.jobs])
    jobs = state.jobs.values()
    lost = sum(lease.asked is None for lease in state.leases) - len(jobs)
    report(
        f"{arguments.ray} nodes, one killed, a new one later: {seconds:.0f} s, {len(state.leases)} leases, "
        f"{sum(job.preemptions for job in jobs)} preempted, {lost} lost with the node; load {_load()}"
    )
    report(*_table_of_leases(state.leases))
    wrong = _compare(fleet, folder)
    report(f"other bits than without interruptions: {', '.join(wrong) or 'none'}")
    return "expected the bits of uninterrupted trainings" if wrong else None


def _shares(folder: Path, arguments: argparse.Namespace, report: Callable[..., None]) -> str | None:
    """The example of three jobs in the thesis on two nodes. What is wrong, if anything is."""
    kinds, speeds = ("V100", "K80"), {"a": (40, 10), "b": (12, 4), "c": (100, 50)}
    seconds = arguments.shares * arguments.round_seconds
    script = str(ROOT / "tests" / "support" / "scripts" / "plain_training.py")
    jobs = [
        {
            "name": name,
            "steps": max(row) * seconds * 10,
            "throughputs": dict(zip(kinds, row, strict=True)),
            "command": [script, "{directory}", "{steps}", "0.2"],
        }
        for name, row in speeds.items()
    ]
    path = folder / "fleet.yaml"
    path.write_text(
        yaml.safe_dump(
            {"format": "penstock-fleet/1", "kinds": [{"name": kind, "workers": 1} for kind in kinds], "jobs": jobs}
        )
    )
    fleet = FleetFile.load(path)
    cluster, _ = _cluster(*kinds)
    executor = subprocess.Popen(_command(folder, arguments, "--ray", cluster.address), cwd=ROOT)
    time.sleep(seconds + 10)
    executor.send_signal(signal.SIGINT)
    executor.wait()
    cluster.shutdown()
    return _compare_shares(fleet, RunState.load(folder / "run" / "state.json", list(speeds)), arguments, report)


def _compare_shares(
    fleet: FleetFile, state: RunState, arguments: argparse.Namespace, report: Callable[..., None]
) -> str | None:
    """Compares the shares of a run with those of a simulation in which a start takes as long. What is wrong, if any."""
    names, kinds = list(state.jobs), [kind.name for kind in fleet.kinds]
    seconds = arguments.shares * arguments.round_seconds
    start = statistics.mean(lease.begun - lease.start for lease in state.leases if lease.begun is not None)
    began = min(lease.start for lease in state.leases)
    held = [Held(each.job, each.kind, each.workers, each.start - began, each.stop - began) for each in state.leases]
    simulated = simulate_fleet(
        fleet.workload(fleet.table()),
        fleet.kinds,
        POLICIES[arguments.policy],
        round_seconds=arguments.round_seconds,
        restart_seconds=start,
        record=True,
    )
    rows, worst = [("job", "kind", "simulated", "measured")], 0.0
    for name in names:
        for kind in kinds:
            parts = [_part(each, name, kind, seconds) for each in (simulated.held, held)]
            worst = max(worst, abs(parts[0] - parts[1]))
            rows.append((name, kind, *(f"{part:.3f}" for part in parts)))
    report(
        f"shares of {arguments.shares} rounds on two nodes of Ray; {len(held)} leases; a start takes {start:.1f} s; "
        f"load {_load()}"
    )
    report(*table_lines(rows, left={0, 1}))
    report(f"the greatest difference: {worst:.3f} of the time")
    return "expected shares within 0.02 of the simulation" if worst > 0.02 else None


def _part(held: Sequence[Held], job: str, devices: str, seconds: float) -> float:
    """The part of the first `seconds` for which a job had a device."""
    own = [each for each in held if (each.job, each.devices) == (job, devices) and each.start < seconds]
    return sum(min(each.stop, seconds) - each.start for each in own) / seconds


if __name__ == "__main__":
    main()
