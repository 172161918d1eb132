"""The executor of `penstock fleet run`, measured: bits after preemptions and after its own death, and its makespan.

    python benchmarks/fleet_runs.py --round-seconds 20 --steps 2

Five trainings on two emulated kinds, of two processes and of one. It ends with an error if any of them ends with other
weights than a training that nothing interrupted, to the bit.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from penstock.fleet import POLICIES, Arrival, FleetExecutor, FleetFile, FleetRun, Job, simulate_fleet
from penstock.fleet.run_states import RunState

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round-seconds", type=float, default=20.0)
    parser.add_argument("--grace-seconds", type=float, default=60.0)
    parser.add_argument("--policy", choices=list(POLICIES), default="max-min-fairness")
    parser.add_argument("--steps", type=float, default=1.0, help="times those of the file")
    parser.add_argument("--kill-after", type=float, default=30.0, help="seconds until the executor is killed; 0: never")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = _fleet_file(Path(folder), arguments.steps)
        command = _command(path, folder, arguments)
        if arguments.kill_after:
            first = subprocess.Popen(command, cwd=ROOT)
            try:
                first.wait(arguments.kill_after)
            except subprocess.TimeoutExpired:
                first.kill()
                first.wait()
                print(f"killed the executor after {arguments.kill_after} s", flush=True)
        fleet = FleetFile.load(path)
        run = FleetExecutor(
            fleet,
            POLICIES[arguments.policy],
            Path(folder, "run"),
            round_seconds=arguments.round_seconds,
            grace_seconds=arguments.grace_seconds,
            report=lambda line: print(line, flush=True),
        ).run()
        print(run.describe())
        state = RunState.load(Path(folder, "run", "state.json"), [model.job.name for model in fleet.jobs])
        print(f"preempted {sum(job.preemptions for job in state.jobs.values())} times")
        wrong = _compare(fleet, Path(folder))
        _predict(fleet, run, arguments)
    if wrong:
        sys.exit(f"other weights than without interruptions: {', '.join(wrong)}")


def _fleet_file(folder: Path, factor: float) -> Path:
    """The example's file with more steps."""
    document = yaml.safe_load((ROOT / "examples" / "fleet" / "fleet.yaml").read_text())
    for job in document["jobs"]:
        job["steps"] = int(job["steps"] * factor)
        job["command"] = [str(ROOT / job["command"][0]), *map(str, job["command"][1:])]
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def _command(path: Path, folder: str, arguments: argparse.Namespace) -> list[str]:
    options = ["--round-seconds", str(arguments.round_seconds), "--grace-seconds", str(arguments.grace_seconds)]
    run = ["-m", "penstock", "fleet", "run", str(path), "--policy", arguments.policy, "-d", f"{folder}/run"]
    return [sys.executable, *run, *options]


def _compare(fleet: FleetFile, folder: Path) -> list[str]:
    """The jobs whose weights differ from those of an uninterrupted training in one process."""
    wrong = []
    for model, command in zip(fleet.jobs, fleet.commands, strict=True):
        assert command is not None
        alone = folder / "alone" / model.job.name / "checkpoints"
        began = time.monotonic()
        subprocess.run([sys.executable, *command.filled(alone, model.job.steps, 1)], check=True)
        found, expected = (
            json.loads((place / model.job.name / "result.json").read_text())
            for place in (folder / "run", folder / "alone")
        )
        same = found["digest"] == expected["digest"] and found["steps"] == expected["steps"]
        print(f"{model.job.name}: {'the same bits' if same else 'OTHER BITS'}; alone {time.monotonic() - began:.1f} s")
        wrong += [] if same else [model.job.name]
    return wrong


def _predict(fleet: FleetFile, run: FleetRun, arguments: argparse.Namespace) -> None:
    """Simulates the run with the throughputs that it had: steps over busy seconds, the same on all kinds."""
    busy = {job.job.name: job.busy_seconds for job in run.jobs}
    workload = [
        Arrival(
            seconds, Job(model.job.name, model.job.steps), (model.job.steps / busy[model.job.name],) * len(fleet.kinds)
        )
        for model, seconds in zip(fleet.jobs, fleet.arrivals, strict=True)
    ]
    policy = POLICIES[arguments.policy]
    expected = simulate_fleet(workload, fleet.kinds, policy, round_seconds=arguments.round_seconds, restart_seconds=0)
    error = expected.makespan / run.makespan - 1
    print(f"makespan: {run.makespan:.1f} s measured, {expected.makespan:.1f} s simulated ({error:+.1%})")


if __name__ == "__main__":
    main()
