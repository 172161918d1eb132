"""Plays a workload through: rounds, leases, checkpoints between them, and a new allocation whenever jobs come or go.

The simulated scheduler is the real one: the same policies, and the same `RoundScheduler`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy

from penstock.arguments import check_arguments, integer, number
from penstock.errors import PlanError
from penstock.fleet.histories import CompletedJob, FleetRun, Held
from penstock.fleet.jobs import Entity
from penstock.fleet.kinds import Kind
from penstock.fleet.policies import Policy
from penstock.fleet.prices import PriceHistory
from penstock.fleet.problems import Problem
from penstock.fleet.round_scheduler import Lease, RoundScheduler
from penstock.fleet.workloads import Arrival

__all__ = ["simulate_fleet"]

_RULES = {
    "round_seconds": number(above=0, unit="seconds").but("give the length of a round"),
    "reset_rounds": integer(1, unit="rounds").but("give a number of rounds, or leave it out").optional,
    "restart_seconds": number(0, unit="seconds").but("give the time to save a checkpoint and load it elsewhere"),
}


@dataclass(slots=True)
class _Running:
    """A job in the simulation."""

    arrival: Arrival
    left: float
    isolated_seconds: float = 0.0
    busy_seconds: float = 0.0
    cost: float = 0.0
    restarts: int = 0


def simulate_fleet(
    workload: Sequence[Arrival],
    kinds: Sequence[Kind],
    policy: Policy,
    *,
    round_seconds: float = 360.0,
    restart_seconds: float = 5.0,
    reset_rounds: int | None = None,
    watched: range | None = None,
    entities: Sequence[Entity] = (),
    prices: PriceHistory | None = None,
    ideal: bool = False,
    record: bool = False,
) -> FleetRun:
    """Runs the jobs of `workload` on `kinds` under `policy`.

    `restart_seconds`: what a job loses of a round whose lease is not renewed. `reset_rounds`: the policy is asked again
    after this many rounds, and not only when jobs or prices have changed. `watched`: the numbers of the jobs that
    the results are about; the simulation ends with the last of them, while the others keep the fleet busy. `ideal`: no
    rounds; each job runs at exactly its share at any time. `record`: keep all leases, for pictures.
    """
    check_arguments("simulate_fleet", locals(), _RULES, PlanError)
    if not workload:
        raise PlanError("simulate_fleet(workload=): expected one arrival or more, found none: there is nothing to run")
    fleet = _Fleet(
        sorted(workload, key=lambda arrival: arrival.seconds),
        tuple(kinds),
        policy,
        watched=range(len(workload)) if watched is None else watched,
        entities=tuple(entities),
        prices=PriceHistory({}) if prices is None else prices,
    )
    if ideal:
        fleet.run_ideal()
    else:
        fleet.run_rounds(round_seconds, restart_seconds, reset_rounds or 10**9, record)
    return FleetRun(tuple(kinds), tuple(fleet.done), fleet.clock, fleet.allocations, tuple(fleet.held))


@dataclass(slots=True)
class _Fleet:
    """The state of a simulation."""

    workload: list[Arrival]
    kinds: tuple[Kind, ...]
    policy: Policy
    watched: range
    entities: tuple[Entity, ...]
    prices: PriceHistory
    clock: float = 0.0
    arrived: int = 0
    allocations: int = 0
    running: dict[str, _Running] = field(default_factory=dict)
    done: list[CompletedJob] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)
    """The watched jobs that have not finished."""
    speeds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Steps per second of each running job, by kind."""
    hourly: dict[str, float] = field(default_factory=dict)
    """The price of a device of each kind now."""

    def __post_init__(self) -> None:
        self.waiting = {self.workload[index].job.name for index in self.watched}

    def run_rounds(self, round_seconds: float, restart_seconds: float, reset_rounds: int, record: bool) -> None:
        scheduler, changed, again = RoundScheduler(self.kinds), True, 0.0
        while self.waiting:
            if not self.running:
                # Rounds begin at multiples of their length, so the first one after the next arrival is next.
                behind = self.workload[self.arrived].seconds - self.clock
                self.clock += max(0, math.ceil(behind / round_seconds - 1e-9)) * round_seconds
            changed |= self._admit()
            if changed or self.clock >= again - 1e-9:
                scheduler.begin(self.policy(self._problem()))
                self.allocations += 1
                changed = False
                again = min(self.prices.next_change(self.clock), self.clock + reset_rounds * round_seconds)
                self.hourly = {kind.name: kind.price_per_hour for kind in self._priced_kinds()}
            leases = scheduler.next_round()
            if not leases and self.arrived == len(self.workload):
                raise PlanError("simulate_fleet(policy=): expected a share for some job, found none: no job can finish")
            running = len(self.running)
            seconds = {lease.jobs: self._run_lease(lease, round_seconds, restart_seconds, record) for lease in leases}
            scheduler.end_round(seconds)
            self.clock += round_seconds
            changed |= len(self.running) < running
        self.clock = max(job.finished for job in self.done)

    def run_ideal(self) -> None:
        while self.waiting:
            if not self.running:
                self.clock = max(self.clock, self.workload[self.arrived].seconds)
            self._admit()
            problem = self._problem()
            allocation = self.policy(problem)
            self.allocations += 1
            seconds = allocation.seconds_left()
            coming = self.workload[self.arrived].seconds if self.arrived < len(self.workload) else math.inf
            span = min(float(seconds.min()), coming - self.clock, self.prices.next_change(self.clock) - self.clock)
            if not math.isfinite(span):
                raise PlanError("simulate_fleet(policy=): expected a share for some job, found none: no job can finish")
            rates, isolated = allocation.throughputs(), self._isolated(problem)
            hourly = allocation.array()[: len(problem.jobs)] @ [kind.price_per_hour for kind in problem.kinds]
            for m, name in enumerate(list(self.running)):
                job = self.running[name]
                job.cost += hourly[m] * problem.jobs[m].workers * span / 3600
                job.busy_seconds += float(allocation.busy()[m]) * span
                job.isolated_seconds += rates[m] * span / isolated[m]
                job.left -= rates[m] * span
                if seconds[m] <= span * (1 + 1e-12):
                    self._finish(name, self.clock + span)
            self.clock += span

    def _admit(self) -> bool:
        """Takes in the jobs that have arrived; says whether there are any."""
        first = self.arrived
        while self.arrived < len(self.workload) and self.workload[self.arrived].seconds <= self.clock + 1e-9:
            arrival = self.workload[self.arrived]
            self.running[arrival.job.name] = _Running(arrival, arrival.job.steps)
            self.speeds[arrival.job.name] = {
                kind.name: speed for kind, speed in zip(self.kinds, arrival.throughputs, strict=True)
            }
            self.arrived += 1
        return self.arrived > first

    def _problem(self) -> Problem:
        """What the policy sees now. A deadline that has passed, or that no kind is fast enough for, is one no more."""
        jobs = []
        for running in self.running.values():
            job, age = running.arrival.job, self.clock - running.arrival.seconds
            deadline = job.deadline_seconds
            if deadline is not None:
                left = deadline - age
                deadline = left if left * max(running.arrival.throughputs) >= running.left else None
            jobs.append(
                replace(
                    job,
                    steps=running.left,
                    elapsed_seconds=max(age, 0.0),
                    isolated_seconds=running.isolated_seconds,
                    deadline_seconds=deadline,
                )
            )
        rows = tuple(running.arrival.throughputs for running in self.running.values())
        return Problem(tuple(jobs), self._priced_kinds(), rows, entities=self.entities)

    def _priced_kinds(self) -> tuple[Kind, ...]:
        prices = [self.prices.at(kind.name, self.clock) for kind in self.kinds]
        return tuple(
            kind if price is None else replace(kind, price_per_hour=price)
            for kind, price in zip(self.kinds, prices, strict=True)
        )

    def _run_lease(self, lease: Lease, round_seconds: float, restart_seconds: float, record: bool) -> float:
        """Runs the job of a lease for a round, or to its end; the seconds that it had its workers for."""
        (name,) = lease.jobs
        job = self.running[name]
        speed = self.speeds[name][lease.kind]
        job.restarts += not lease.renewed and job.busy_seconds > 0
        lost = 0.0 if lease.renewed else min(restart_seconds, round_seconds)
        needed = lost + job.left / speed
        spent = min(round_seconds, needed)
        steps = min(job.left, max(0.0, spent - lost) * speed)
        job.cost += self.hourly[lease.kind] * len(lease.workers) * spent / 3600
        job.busy_seconds += spent
        job.isolated_seconds += steps / self._isolated_speed(job)
        job.left -= steps
        if record:
            self.held.append(Held(name, lease.devices, lease.workers, self.clock, self.clock + spent))
        if needed <= round_seconds:
            self._finish(name, self.clock + spent)
        return spent

    def _isolated_speed(self, job: _Running) -> float:
        """The throughput of a job if it had 1/n of every kind now."""
        count, size = len(self.running), job.arrival.job.workers
        shares = [kind.workers / count / size for kind in self.kinds]
        total = max(1.0, sum(share for share, speed in zip(shares, job.arrival.throughputs, strict=True) if speed))
        return sum(share * speed for share, speed in zip(shares, job.arrival.throughputs, strict=True)) / total

    def _isolated(self, problem: Problem) -> list[float]:
        found: list[float] = numpy.sum(problem.speeds() * problem.isolated_shares(), axis=1).tolist()
        return found

    def _finish(self, name: str, seconds: float) -> None:
        job = self.running.pop(name)
        del self.speeds[name]
        if name not in self.waiting:
            return
        self.waiting.discard(name)
        self.done.append(
            CompletedJob(
                job.arrival.job,
                arrived=job.arrival.seconds,
                finished=seconds,
                busy_seconds=job.busy_seconds,
                isolated_seconds=job.isolated_seconds,
                cost=job.cost,
                restarts=job.restarts,
            )
        )
