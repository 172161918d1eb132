"""The executor of `penstock fleet run`, measured: bits after preemptions and after its own death, and its makespan.

    python benchmarks/fleet_runs.py --save benchmarks/results/fleet-runs.txt
    python benchmarks/fleet_runs.py --kill-after 200

Five trainings on two emulated kinds, of two processes and of one. Both kinds are this machine, so a kind also has a
time that a step takes at least. With --kill-after the executor is killed in the midst of the run and started again. The
trainings run on meanwhile, so the prediction is the same.

The makespan is predicted before the run: a lease of a training on each kind, both kinds at a time, gives its steps per
second and the seconds of a start and of an end, and the simulator does the rest. After the run every lease is listed,
and the simulator is asked again with what the leases of the run took: what that prediction still misses is not due to
the three numbers. The program ends with an error if any training ends with other weights than one that nothing
interrupted, to the bit, or if fewer than ten were preempted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from measurement.reports import Report, conditions, option_parser
from penstock.fleet import POLICIES, FleetFile, simulate_fleet
from penstock.fleet.executor import LeaseRecord, RunState
from penstock.fleet.lease_processes import THIS_NODE, Launch, LeaseProcesses, ThisNode
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
    arguments = parser.parse_args()
    report = Report(arguments.save).add
    report(conditions("benchmarks/fleet_runs.py"))
    report(f"rounds of {arguments.round_seconds:g} s, {arguments.policy}")
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
        speed = "-" if lease.begun is None else f"{_speed(lease):.2f}"
        end = "-" if lease.asked is None else f"{lease.stop - lease.asked:.1f}"
        steps = str(lease.steps_after - lease.steps_before)
        rows.append((lease.job, lease.kind, f"{lease.start:.0f}", start, steps, speed, end, f"{lease.stop:.0f}"))
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


def _run(folder: Path, arguments: argparse.Namespace) -> float:
    """Runs the fleet, with an executor that is killed and its successor; the seconds from the first to the end."""
    options = ["--round-seconds", str(arguments.round_seconds), "--grace-seconds", str(arguments.grace_seconds)]
    words = ["fleet", "run", str(folder / "fleet.yaml"), "--policy", arguments.policy, "-d", str(folder / "run")]
    command = [sys.executable, "-m", "penstock", *words, *options]
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


if __name__ == "__main__":
    main()
