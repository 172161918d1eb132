"""Runs the jobs of a fleet file on this machine, round by round, as real trainings.

A kind is emulated by a number of processes. At the end of a round a job whose lease is renewed notices nothing. Others
get SIGUSR1, save, and leave; when they get workers again they go on from their checkpoint, perhaps on another number of
stages. The executor may be killed at any moment: the next one finds its state, ends what it left behind, and goes on.

It knows one machine and no users, quotas or networks: it is not a cluster manager. `cluster_jobs.py` writes the leases
of a round as jobs for one.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.arguments import check_arguments, integer, number
from penstock.errors import PenstockError, PlanError
from penstock.fleet.fleet_files import FleetFile
from penstock.fleet.histories import CompletedJob, FleetRun, Held
from penstock.fleet.lease_processes import LeaseProcess, find_left_behind, training_words
from penstock.fleet.policies import Policy
from penstock.fleet.problems import Problem
from penstock.fleet.round_scheduler import Lease, RoundScheduler
from penstock.fleet.run_states import JobState, RunState, steps_done

__all__ = ["FleetExecutor"]

_POLL_SECONDS = 0.05
_RULES = {
    "round_seconds": number(above=0, unit="seconds").but("give the length of a round"),
    "grace_seconds": number(0, unit="seconds").but("give the time that a training has to save"),
    "most_failures": integer(1).but("give the number of failures in a row after which a job is given up"),
}


class FleetExecutor:
    """Trains all jobs of a fleet file in processes of this machine."""

    def __init__(
        self,
        fleet: FleetFile,
        policy: Policy,
        directory: str | Path,
        *,
        round_seconds: float = 30.0,
        grace_seconds: float = 60.0,
        most_failures: int = 3,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`directory`: has the state, and a folder for each job. `report`: takes a line for every event."""
        check_arguments("FleetExecutor", locals(), _RULES, PlanError)
        for model, command in zip(fleet.jobs, fleet.commands, strict=True):
            if command is None:
                raise PlanError(
                    f"job {model.job.name!r}: command: expected the words that start it, found none: add it"
                )
        self._fleet, self._policy, self._report = fleet, policy, report
        self._table = fleet.table()
        self._commands = {
            model.job.name: command for model, command in zip(fleet.jobs, fleet.commands, strict=True) if command
        }
        self._directory = Path(directory).absolute()
        self._round_seconds, self._grace_seconds, self._most_failures = round_seconds, grace_seconds, most_failures
        self._scheduler = RoundScheduler(fleet.kinds)
        self._processes: dict[str, LeaseProcess] = {}
        self._known: tuple[str, ...] = ()
        # The steps that each job had done when its lease began.
        self._begun: dict[str, int] = {}

    def run(self) -> FleetRun:
        """Trains until every job is done or given up. Raises `PenstockError` if some were given up."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._state = RunState.load(self._directory / "state.json", [model.job.name for model in self._fleet.jobs])
        self._end_what_was_left()
        self._began = time.monotonic() - self._state.seconds
        try:
            while self._unfinished():
                self._round()
        finally:
            for name in list(self._processes):
                self._stop(name)
            self._save()
        failed = [name for name, job in self._state.jobs.items() if job.status == "failed"]
        if failed:
            folders = ", ".join(str(self._folder(name) / "output.txt") for name in failed)
            raise PenstockError(
                f"{', '.join(failed)}: expected that the training ends with exit code 0, found {self._most_failures} "
                f"failures in a row: read {folders}, and run again"
            )
        return self._result()

    def _round(self) -> None:
        """Leases for one round: stop those that are not renewed, start the new ones, wait for the end of the round."""
        self._state.seconds = self._now()
        active = self._active()
        if active:
            if active != self._known:
                self._scheduler.begin(self._policy(self._problem(active)))
                self._known = active
            leases = self._scheduler.next_round(active)
            kept = {lease.jobs[0] for lease in leases if lease.renewed and lease.jobs[0] in self._processes}
            for name in [name for name in self._processes if name not in kept]:
                self._state.jobs[name].preemptions += 1
                self._stop(name)
            for lease in leases:
                if lease.jobs[0] not in self._processes and self._state.jobs[lease.jobs[0]].status == "waiting":
                    self._start(lease)
        self._state.rounds += 1
        self._save()
        begin = self._now()
        while self._now() < begin + self._round_seconds and self._unfinished():
            self._notice_ends()
            if active and not self._processes:
                break
            time.sleep(_POLL_SECONDS)
        spent = self._now() - begin
        self._scheduler.end_round({lease.jobs: spent for lease in self._scheduler.leases})

    def _problem(self, active: tuple[str, ...]) -> Problem:
        """What the policy decides about now: the steps that are not in a checkpoint yet."""
        numbers = [index for index, model in enumerate(self._fleet.jobs) if model.job.name in active]
        jobs = []
        for index in numbers:
            job = self._fleet.jobs[index].job
            left = max(job.steps - steps_done(self._checkpoints(job.name)), 1.0)
            age = max(self._now() - self._fleet.arrivals[index], 0.0)
            deadline = None if job.deadline_seconds is None else max(job.deadline_seconds - age, 1.0)
            jobs.append(replace(job, steps=left, elapsed_seconds=age, deadline_seconds=deadline))
        rows = self._table.throughputs()
        return Problem(tuple(jobs), self._fleet.kinds, tuple(rows[i] for i in numbers), entities=self._fleet.entities)

    def _start(self, lease: Lease) -> None:
        name = lease.jobs[0]
        job, command = self._state.jobs[name], self._commands[name]
        processes = command.processes.get(lease.kind, len(lease.workers))
        job.leases += 1
        job.lease = f"{self._directory}/{name}/{job.leases}"
        job.status, job.kind, job.workers, job.started = "running", lease.kind, lease.workers, self._now()
        # The name of the lease is on disk before the process is there.
        self._save()
        environment = {
            "PENSTOCK_FLEET_KIND": lease.kind,
            "PENSTOCK_FLEET_WORKERS": ",".join(map(str, lease.workers)),
            "OMP_NUM_THREADS": "1",
        }
        steps = next(model.job.steps for model in self._fleet.jobs if model.job.name == name)
        self._begun[name] = steps_done(self._checkpoints(name))
        words = training_words(command.filled(self._checkpoints(name), steps, processes), processes)
        self._processes[name] = LeaseProcess.start(words, job.lease, self._folder(name), environment)
        self._report(f"{name}: lease {job.leases} on {lease.kind} {list(lease.workers)}, {processes} processes")

    def _stop(self, name: str) -> None:
        """Ends a lease: the training saves and leaves, and goes on with its next one."""
        self._close(name, self._processes[name].stop(self._grace_seconds), asked=True)
        if self._state.jobs[name].status == "waiting" and steps_done(self._checkpoints(name)) == self._begun[name]:
            self._report(f"{name}: its lease ended before a step was saved; longer rounds would help")

    def _notice_ends(self) -> None:
        for name, process in list(self._processes.items()):
            if (code := process.exit_code()) is not None:
                process.kill()
                self._close(name, code, asked=False)

    def _close(self, name: str, code: int, asked: bool) -> None:
        """Takes note that the processes of a job have ended."""
        del self._processes[name]
        job, now = self._state.jobs[name], self._now()
        job.busy_seconds += now - job.started
        self._state.held.append(Held(name, self._pool(job.kind), job.workers, job.started, now))
        if code == 0:
            job.status, job.finished, job.failures = "done", now, 0
            self._report(f"{name}: done after {job.leases} leases")
        elif asked:
            job.status, job.failures = "waiting", 0
        else:
            job.failures += 1
            job.status = "failed" if job.failures >= self._most_failures else "waiting"
            self._report(f"{name}: ended with exit code {code}, failure {job.failures} of {self._most_failures}")
        self._save()

    def _end_what_was_left(self) -> None:
        """Ends the trainings of an executor that was killed: they save, and go on with a new lease."""
        for name, job in self._state.jobs.items():
            if job.status == "running":
                process = find_left_behind(self._folder(name), job.lease)
                if process is not None:
                    process.stop(self._grace_seconds)
                    self._report(f"{name}: stopped what an earlier executor had started")
                job.status = "waiting"
        self._known = ()

    def _active(self) -> tuple[str, ...]:
        """The jobs that have arrived and are not done."""
        there = zip(self._fleet.jobs, self._fleet.arrivals, strict=True)
        arrived = [model.job.name for model, seconds in there if seconds <= self._now()]
        return tuple(name for name in arrived if self._state.jobs[name].status in ("waiting", "running"))

    def _unfinished(self) -> bool:
        return any(job.status in ("waiting", "running") for job in self._state.jobs.values())

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _save(self) -> None:
        self._state.seconds = self._now()
        self._state.save(self._directory / "state.json")

    def _folder(self, name: str) -> Path:
        return self._directory / name

    def _checkpoints(self, name: str) -> Path:
        return self._folder(name) / "checkpoints"

    def _pool(self, kind: str) -> str:
        return next(found.devices for found in self._fleet.kinds if found.name == kind)

    def _result(self) -> FleetRun:
        # Of a fleet that all jobs of the file share, for their whole lives.
        problem = self._fleet.problem(self._table)
        isolated = problem.jobs, (problem.speeds() * problem.isolated_shares()).sum(axis=1).tolist()
        alone = {job.name: job.steps / speed for job, speed in zip(*isolated, strict=True)}
        done = []
        for model, arrived in zip(self._fleet.jobs, self._fleet.arrivals, strict=True):
            job: JobState = self._state.jobs[model.job.name]
            done.append(
                CompletedJob(
                    model.job,
                    arrived=arrived,
                    finished=job.finished,
                    busy_seconds=job.busy_seconds,
                    isolated_seconds=alone[model.job.name],
                    cost=self._cost(model.job.name),
                    restarts=job.leases - 1,
                )
            )
        done.sort(key=lambda job: job.finished)
        return FleetRun(
            self._fleet.kinds, tuple(done), self._state.seconds, self._state.rounds, tuple(self._state.held)
        )

    def _cost(self, name: str) -> float:
        prices = {kind.devices: kind.price_per_hour for kind in self._fleet.kinds}
        return sum(
            prices[held.devices] * len(held.workers) * (held.stop - held.start) / 3600
            for held in self._state.held
            if held.job == name
        )
