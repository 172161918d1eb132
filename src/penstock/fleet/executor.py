"""Runs the jobs of a fleet file, round by round, as real trainings: on this machine, or on the nodes of Ray.

At the end of a round a job whose lease is renewed notices nothing. Others get SIGUSR1, save, and leave; when they get
workers again they go on from their checkpoint, perhaps on another number of stages. Nodes may come and go. The executor
may be killed at any moment: its trainings run on, and the next executor takes them over.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.arguments import check_arguments, integer, number
from penstock.errors import PenstockError, PlanError, counted
from penstock.fleet.fleet_files import FleetFile, TrainingCommand
from penstock.fleet.histories import CompletedJob, FleetRun, Held
from penstock.fleet.lease_processes import LOST, Launch, LeaseProcesses, Nodes, ThisNode
from penstock.fleet.policies import Policy, decide
from penstock.fleet.problems import Problem, budget_left
from penstock.fleet.round_scheduler import Lease, RoundScheduler
from penstock.fleet.run_states import LeaseRecord, RunState, number_workers, steps_done

_POLL_SECONDS = 0.05
_KILLED = -9
_RULES = {
    "round_seconds": number(above=0, unit="seconds").but("give the length of a round"),
    "grace_seconds": number(0, unit="seconds").but("give the time that a training has to save"),
    "most_failures": integer(1).but("give the number of failures in a row after which a job is given up"),
}


class FleetExecutor:
    """Trains all jobs of a fleet file in processes of its nodes."""

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
        nodes: Nodes | None = None,
    ) -> None:
        """`directory`: has the state, and a folder for each job; all nodes see it. `report`: takes a line for every
        event. `nodes`: by default this machine, which emulates every kind.
        """
        check_arguments(
            "FleetExecutor",
            _RULES,
            PlanError,
            round_seconds=round_seconds,
            grace_seconds=grace_seconds,
            most_failures=most_failures,
        )
        self._commands: dict[str, TrainingCommand] = {}
        for model, command in zip(fleet.jobs, fleet.commands, strict=True):
            if command is None:
                raise PlanError(
                    f"job {model.job.name!r}: command: expected the words that start it, found none: add it"
                )
            self._commands[model.job.name] = command
        self._fleet, self._policy, self._report = fleet, policy, report
        self._nodes = ThisNode() if nodes is None else nodes
        self._table = fleet.table()
        # A job that runs on no kind is refused, and not taken for one whose machines are not there.
        fleet.problem(self._table)
        self._steps = {model.job.name: model.job.steps for model in fleet.jobs}
        self._directory = Path(directory).absolute()
        self._round_seconds, self._grace_seconds, self._most_failures = round_seconds, grace_seconds, most_failures
        self._processes: dict[str, LeaseProcesses] = {}
        self._records: dict[str, LeaseRecord] = {}
        self._known: tuple[tuple[str, ...], list[int]] = ((), [])
        """The jobs and the workers that the last decision was about."""
        self._isolated: dict[str, float] = {}
        """The steps per second of each job of the last decision on 1/n of the fleet."""

    def run(self) -> FleetRun:
        """Trains until every job is done or given up. Raises `PenstockError` if some were given up."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._state = RunState.load(self._directory / "state.json", list(self._steps))
        self._began = time.monotonic() - self._state.seconds
        self._take_over()
        self._look_around()
        found = [
            Lease((name,), record.kind, record.devices, record.workers, renewed=True)
            for name, record in self._records.items()
        ]
        self._scheduler = RoundScheduler(self._fleet.kinds, found)
        self._kept = set(self._records)
        try:
            while self._unfinished():
                self._round()
        finally:
            self._exchange(list(self._processes), [])
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
        """Leases for one round: end those that are not renewed, start the new ones, wait for the end of the round.
        The seconds of the first two are a part of the round.
        """
        begin = self._state.seconds = self._now()
        self._look_around()
        active = self._active()
        if active:
            if (active, there := self._state.there(self._fleet.kinds)) != self._known:
                begun = bool(self._state.leases)
                self._scheduler.begin(decide(self._policy, self._problem(active), begun, self._report))
                self._known = active, there
            young = [name for name in self._processes if self._is_young(name)]
            leases = self._scheduler.next_round(active, young, self._state.absent())
            kept = {lease.jobs[0] for lease in leases if lease.renewed and lease.jobs[0] in self._processes}
            self._exchange([name for name in self._processes if name not in kept], leases)
            self._kept.clear()
        self._state.rounds += 1
        self._save()
        while self._now() < begin + self._round_seconds and self._unfinished():
            if self._notice() or (active and not self._processes):
                break
            time.sleep(_POLL_SECONDS)
        spent = self._now() - begin
        self._scheduler.end_round({lease.jobs: spent for lease in self._scheduler.leases})

    def _look_around(self) -> None:
        """Numbers the workers that are there now. Leases whose nodes are gone end."""
        state, kinds = self._state, self._fleet.kinds
        before = state.there(kinds)
        state.nodes = number_workers(kinds, state.nodes, self._nodes.there(kinds))
        for kind, old, now in zip(kinds, before, state.there(kinds), strict=True):
            if now != old:
                self._report(f"{kind.name}: {now} of {kind.workers} workers are there")
        for name, record in list(self._records.items()):
            if self._state.nodes_of(record.devices, record.workers) != record.nodes:
                self._processes[name].kill()
                self._close(name, LOST)

    def _problem(self, active: tuple[str, ...]) -> Problem:
        """What the policy decides about now: the steps that are still to be made, on the workers that are there. No job
        has a speed on a kind that is not.
        """
        self._count_isolated()
        numbers = [index for index, model in enumerate(self._fleet.jobs) if model.job.name in active]
        jobs = []
        for index in numbers:
            job = self._fleet.jobs[index].job
            left, state = max(job.steps - self._steps_made(job.name), 1.0), self._state.jobs[job.name]
            age = max(self._now() - self._fleet.arrivals[index], 0.0)
            deadline = None if job.deadline_seconds is None else max(job.deadline_seconds - age, 1.0)
            now = replace(job, steps=left, elapsed_seconds=age, isolated_seconds=state.isolated_seconds)
            jobs.append(replace(now, deadline_seconds=deadline))
        rows, counts = self._table.throughputs(), self._state.there(self._fleet.kinds)
        budget = budget_left(self._fleet.budget, self._cost(self._state.held(self._now())))
        speeds = tuple(tuple(s if n else 0.0 for s, n in zip(rows[i], counts, strict=True)) for i in numbers)
        kinds = tuple(replace(kind, workers=max(n, 1)) for kind, n in zip(self._fleet.kinds, counts, strict=True))
        problem = Problem(tuple(jobs), kinds, speeds, entities=self._fleet.entities, budget=budget)
        self._isolated = dict(zip(active, problem.isolated_speeds().tolist(), strict=True))
        return problem

    def _steps_made(self, name: str) -> float:
        """The steps that a job has made, of which its training tells about once a second; those in its newest
        checkpoint where it does not tell.
        """
        saved = steps_done(self._checkpoints(name))
        if name not in self._processes:
            return saved
        try:
            return max(saved, int((self._folder(name) / "begun").read_text()))
        except (OSError, ValueError):
            return saved

    def _count_isolated(self) -> None:
        """Adds the steps since the last decision to the `isolated_seconds` of the jobs that it was about."""
        for name, speed in self._isolated.items():
            state, made = self._state.jobs[name], self._steps_made(name)
            state.isolated_seconds += max(made - state.steps_counted, 0.0) / speed
            state.steps_counted = max(made, state.steps_counted)

    def _start(self, lease: Lease) -> None:
        name = lease.jobs[0]
        job = self._state.jobs[name]
        job.leases += 1
        job.lease = f"{self._directory}/{name}/{job.leases}-{secrets.token_hex(4)}"
        job.status = "running"
        record = LeaseRecord(
            name,
            lease.kind,
            lease.devices,
            lease.workers,
            self._state.nodes_of(lease.devices, lease.workers),
            first_round=self._state.rounds,
            start=self._now(),
            steps_before=steps_done(self._checkpoints(name)),
        )
        self._state.leases.append(record)
        self._records[name] = record
        launch = self._launch(record)
        launch.folder.mkdir(parents=True, exist_ok=True)
        (launch.folder / "begun").unlink(missing_ok=True)
        # The name of the lease is on disk before the process is there.
        launch.note.write_text(job.lease)
        self._save()
        self._processes[name] = self._nodes.start(launch)
        where = f"{lease.kind} {list(lease.workers)}"
        self._report(f"{name}: lease {job.leases} on {where}, {counted(launch.processes, 'process')}")

    def _launch(self, record: LeaseRecord) -> Launch:
        folder, command = self._folder(record.job), self._commands[record.job]
        processes = command.processes.get(record.kind, len(record.workers))
        return Launch(
            lease=self._state.jobs[record.job].lease,
            words=command.filled(self._checkpoints(record.job), self._steps[record.job], processes),
            folder=folder,
            environment={
                "PENSTOCK_FLEET_KIND": record.kind,
                "PENSTOCK_FLEET_WORKERS": ",".join(map(str, record.workers)),
                "PENSTOCK_FLEET_BEGUN": str(folder / "begun"),
                "OMP_NUM_THREADS": "1",
            },
            processes=processes,
            devices=record.devices,
            nodes=record.nodes,
        )

    def _exchange(self, ended: list[str], leases: Sequence[Lease]) -> None:
        """Ends the leases of some jobs: each training saves and leaves, and goes on with its next lease. One that has
        saved all of its steps is leaving already. It is left alone, or it would die of the signal, and have to start
        again. Each of the new `leases` starts when its job and its workers are free, while others may still save.
        """
        for name in ended:
            if not self._has_all_steps(name) and self._records[name].asked is None:
                self._records[name].asked = self._now()
                self._processes[name].ask()
        deadline = time.monotonic() + self._grace_seconds
        due = [lease for lease in leases if lease.jobs[0] in ended or lease.jobs[0] not in self._processes]
        while True:
            for name in list(ended):
                if self._processes[name].exit_code() is not None or time.monotonic() > deadline:
                    self._end(name)
                    ended.remove(name)
            taken = {(self._records[name].devices, worker) for name in ended for worker in self._records[name].workers}
            for lease in list(due):
                if lease.jobs[0] not in ended and taken.isdisjoint((lease.devices, worker) for worker in lease.workers):
                    due.remove(lease)
                    if self._state.jobs[lease.jobs[0]].status == "waiting":
                        self._start(lease)
            if not ended:
                return
            self._notice_begins()
            time.sleep(_POLL_SECONDS)

    def _end(self, name: str) -> None:
        """Takes note that a lease has ended, and kills what is left of it."""
        process, record, job = self._processes[name], self._records[name], self._state.jobs[name]
        code = process.exit_code()
        process.kill()
        self._close(name, _KILLED if code is None else code)
        if job.status != "waiting" or record.asked is None or code == LOST:
            return
        job.preemptions += 1
        if record.steps_after == record.steps_before:
            job.least_rounds = 2 * max(job.least_rounds, self._state.rounds - record.first_round)
            what = f"its next leases last {counted(job.least_rounds, 'round')} or more"
            self._report(f"{name}: its lease ended before a step was saved; {what}")

    def _is_young(self, name: str) -> bool:
        """Whether the lease of a job must go on: its training has just started or been taken over, or shorter leases
        got the job nowhere.
        """
        record = self._records[name]
        starts = record.begun is None and self._now() - record.start < self._grace_seconds
        short = self._state.rounds - record.first_round < self._state.jobs[name].least_rounds
        return starts or short or name in self._kept

    def _has_all_steps(self, name: str) -> bool:
        return steps_done(self._checkpoints(name)) >= self._steps[name]

    def _notice(self) -> bool:
        """Takes note of what has begun and ended; says whether a lease was lost."""
        self._notice_begins()
        codes = {name: process.exit_code() for name, process in self._processes.items()}
        for name, code in codes.items():
            if code is not None:
                self._processes[name].kill()
                self._close(name, code)
        return LOST in codes.values()

    def _notice_begins(self) -> None:
        for name, record in self._records.items():
            if record.begun is None and (self._folder(name) / "begun").exists():
                record.begun = self._now()

    def _close(self, name: str, code: int) -> None:
        """Takes note that the processes of a job have ended."""
        record = self._records.pop(name)
        del self._processes[name]
        job, record.stop = self._state.jobs[name], self._now()
        record.steps_after = steps_done(self._checkpoints(name))
        if code == 0:
            job.status, job.finished, job.failures = "done", record.stop, 0
            self._report(f"{name}: done after {counted(job.leases, 'lease')}")
        elif record.asked is not None:
            job.status, job.failures = "waiting", 0
        elif code == LOST:
            # It starts once more, and leaves if it finds its steps done.
            job.status = "waiting"
            self._report(f"{name}: its end was not seen, as its node or the executor that started it is gone")
        else:
            job.failures += 1
            job.status = "failed" if job.failures >= self._most_failures else "waiting"
            self._report(f"{name}: ended with exit code {code}, failure {job.failures} of {self._most_failures}")
        self._save()

    def _take_over(self) -> None:
        """Finds the trainings of an executor that was killed. They go on for a round at least."""
        for name, job in self._state.jobs.items():
            if job.status != "running":
                continue
            record = next(record for record in reversed(self._state.leases) if record.job == name)
            process = self._nodes.find(self._launch(record))
            if process is None:
                job.status, record.stop = "waiting", self._now()
                continue
            self._processes[name], self._records[name] = process, record
            self._report(f"{name}: took over what an earlier executor had started")

    def _active(self) -> tuple[str, ...]:
        """The jobs that have arrived, are not done, and run on what is there."""
        counts = self._state.there(self._fleet.kinds)
        there = zip(self._fleet.jobs, self._fleet.arrivals, self._table.throughputs(), strict=True)
        arrived = [
            model.job.name
            for model, seconds, row in there
            if seconds <= self._now()
            and any(speed and n >= model.job.workers for speed, n in zip(row, counts, strict=True))
        ]
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

    def _result(self) -> FleetRun:
        # Of a fleet that all jobs of the file share, for their whole lives.
        problem = self._fleet.problem(self._table)
        isolated = problem.jobs, problem.isolated_speeds().tolist()
        alone = {job.name: job.steps / speed for job, speed in zip(*isolated, strict=True)}
        done = []
        for model, arrived in zip(self._fleet.jobs, self._fleet.arrivals, strict=True):
            job = self._state.jobs[model.job.name]
            held = [lease for lease in self._state.held() if lease.job == model.job.name]
            done.append(
                CompletedJob(
                    model.job,
                    arrived=arrived,
                    finished=job.finished,
                    busy_seconds=sum(lease.stop - lease.start for lease in held),
                    isolated_seconds=alone[model.job.name],
                    cost=self._cost(held),
                    restarts=job.leases - 1,
                )
            )
        done.sort(key=lambda job: job.finished)
        return FleetRun(
            self._fleet.kinds, tuple(done), self._state.seconds, self._state.rounds, tuple(self._state.held())
        )

    def _cost(self, leases: Sequence[Held]) -> float:
        prices = {kind.devices: kind.price_per_hour for kind in self._fleet.kinds}
        return sum(prices[lease.devices] * len(lease.workers) * (lease.stop - lease.start) / 3600 for lease in leases)
