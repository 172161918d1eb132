"""Plays a workload through: rounds, leases, checkpoints between them, and a new allocation whenever jobs come or go.

The simulated scheduler is the real one: the same policies, and the same `RoundScheduler`.
"""

import csv
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy

from penstock.arguments import FLAG, Entries, FieldRules, check_arguments, function, instance, integer, number
from penstock.errors import PlanError
from penstock.fleet.allocations import Allocation
from penstock.fleet.histories import CompletedJob, FleetRun, Held
from penstock.fleet.jobs import Arrival, Entity, Kind, moving_cost
from penstock.fleet.policies import Policy, decide
from penstock.fleet.problems import Pair, Problem, budget_left
from penstock.fleet.round_scheduler import Lease, RoundScheduler
from penstock.values.documents import read_text


@dataclass(frozen=True, slots=True)
class PriceHistory:
    """The price of one device for an hour, by kind: (seconds, price) from that time on, ascending."""

    changes: Mapping[str, tuple[tuple[float, float], ...]]

    def __post_init__(self) -> None:
        instance(Mapping, "a mapping", "write the names of kinds and (seconds, price) pairs").check(
            "PriceHistory(changes=)", self.changes, PlanError
        )
        for name, found in self.changes.items():
            times = [seconds for seconds, _ in found]
            if not found or times != sorted(times) or times[0] > 0 or any(price < 0 for _, price in found):
                raise PlanError(
                    f"prices of {name!r}: expected (seconds, price) from second 0 on, ascending, with prices of 0 or "
                    f"more, found {found}: sort them, and begin with a price at 0"
                )

    def at(self, kind: str, seconds: float) -> float | None:
        """The price of `kind` at a time; None if the kind's price never changes."""
        found = self.changes.get(kind)
        return None if found is None else found[bisect_right(found, (seconds, float("inf"))) - 1][1]

    def next_change(self, seconds: float) -> float:
        """The time of the next change of any price, or infinity."""
        later = [time for found in self.changes.values() for time, _ in found if time > seconds]
        return min(later, default=float("inf"))

    @classmethod
    def load(cls, path: str | Path) -> "PriceHistory":
        """Reads a CSV file with the columns seconds, kind and price. `PlanError` names the line that is wrong."""
        changes: dict[str, list[tuple[float, float]]] = {}
        text = read_text(path, PlanError, "prices over time")
        for line, row in enumerate(csv.reader(StringIO(text)), start=1):
            if line == 1 and [cell.strip() for cell in row] == ["seconds", "kind", "price"]:
                continue
            try:
                seconds, kind, price = row
                changes.setdefault(kind.strip(), []).append((float(seconds), float(price)))
            except ValueError:
                raise PlanError(
                    f"{path}: line {line}: expected seconds,kind,price, found {','.join(row)!r}: write two numbers and "
                    "the name of a kind between them"
                ) from None
        return cls({kind: tuple(found) for kind, found in changes.items()})


_RULES: FieldRules = {
    "workload": Entries(instance(Arrival, "an Arrival", "build one of a Job")),
    "kinds": Entries(instance(Kind, "a Kind", "build one")),
    "policy": function(["problem"], "give one of POLICIES, or your own"),
    "entities": Entries(instance(Entity, "an Entity", "build one")),
    "watched": instance(range, "a range of numbers of jobs", "leave it out to watch all").optional,
    "prices": instance(PriceHistory, "a PriceHistory", "build one, or leave it out").optional,
    "pairs": instance(Mapping, "a mapping", "write names of two jobs and their throughputs, or leave it out").optional,
    "ideal": FLAG,
    "record": FLAG,
    "budget": number(above=0).but("give the most that all jobs may cost, or leave it out").optional,
    "round_seconds": number(above=0, unit="seconds").but("give the length of a round"),
    "reset_rounds": integer(1, unit="rounds").but("give a number of rounds, or leave it out").optional,
    "seed": integer(0).but("give the number that the times of preemptions follow from"),
}

_ROUNDING = 1e-6
"""The part of a job's steps that the tolerances of linear programs may leave."""
_RESTART = number(0, unit="seconds").but("give the time to save a checkpoint and load it elsewhere")

Shared = Mapping[tuple[str, str], tuple[tuple[float, ...], tuple[float, ...]]]
"""Steps per second on each kind, of each of two jobs that share devices, by the names of the jobs."""


@dataclass(slots=True)
class _Running:
    """A job in the simulation."""

    arrival: Arrival
    left: float
    isolated_seconds: float = 0.0
    busy_seconds: float = 0.0
    cost: float = 0.0
    restarts: int = 0
    starting: float = 0.0
    """The seconds of its last restart that are still to come."""
    region: str = ""
    """Where its data is."""
    interrupted: bool = False
    """Whether it lost a device in its last round, so that the next one begins with a restart."""


def simulate_fleet(
    workload: Sequence[Arrival],
    kinds: Sequence[Kind],
    policy: Policy,
    *,
    round_seconds: float = 360.0,
    restart_seconds: float | Mapping[str, float] = 5.0,
    reset_rounds: int | None = None,
    watched: range | None = None,
    entities: Sequence[Entity] = (),
    prices: PriceHistory | None = None,
    pairs: Shared | None = None,
    seed: int = 0,
    ideal: bool = False,
    record: bool = False,
    budget: float | None = None,
) -> FleetRun:
    """Runs the jobs of `workload` on `kinds` under `policy`.

    `restart_seconds`: what a job loses when it gets a lease that is not renewed, on all kinds or by kind. Its lease
    then goes on until it has trained, even if that takes more rounds than one. `reset_rounds`: the policy is asked
    again after this many rounds, and not only when jobs or prices have changed. `watched`: the numbers of the jobs that
    the results are about; the simulation ends with the last of them, while the others keep the fleet busy. `pairs`:
    jobs that may share devices. `seed`: of the times at which devices of kinds with `preempted_every_seconds` are taken
    away. `ideal`: no rounds; each job runs at exactly its share at any time, and no device is taken away. `record`:
    keep all leases, for pictures. `budget`: the most that all jobs together may cost; a policy sees what is left of it.

    Where a policy cannot keep its promise at the first moment, its error is raised. Later its nearest allocation is
    taken, and the run has the late jobs and the cost.
    """
    given: dict[str, Any] = {"workload": workload, "kinds": kinds, "policy": policy, "round_seconds": round_seconds}
    given.update(reset_rounds=reset_rounds, watched=watched, entities=entities, prices=prices, pairs=pairs, seed=seed)
    given.update(ideal=ideal, record=record, budget=budget)
    check_arguments("simulate_fleet", _RULES, PlanError, **given)
    lost = restart_seconds
    restarts = dict(lost) if isinstance(lost, Mapping) else {kind.name: lost for kind in kinds}
    for kind in kinds:
        _RESTART.check(f"simulate_fleet(restart_seconds=) of kind {kind.name!r}", restarts.get(kind.name), PlanError)
    if not workload:
        raise PlanError("simulate_fleet(workload=): expected one arrival or more, found none: there is nothing to run")
    fleet = _Fleet(
        sorted(workload, key=lambda arrival: arrival.seconds),
        tuple(kinds),
        policy,
        watched=range(len(workload)) if watched is None else watched,
        entities=tuple(entities),
        prices=PriceHistory({}) if prices is None else prices,
        pairs={} if pairs is None else pairs,
        random=numpy.random.default_rng(seed),
        budget=budget,
    )
    unknown = fleet.prices.changes.keys() - {kind.name for kind in kinds}
    if unknown:
        raise PlanError(
            f"simulate_fleet(prices=): expected prices of {', '.join(kind.name for kind in kinds)}, found some of "
            f"{', '.join(sorted(unknown))}: correct the names"
        )
    _check_throughputs(workload, kinds, fleet.pairs)
    if ideal:
        fleet.run_ideal()
    else:
        fleet.run_rounds(round_seconds, restarts, reset_rounds or 10**9, record)
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
    pairs: Shared
    random: numpy.random.Generator
    budget: float | None = None
    spent: float = 0.0
    """What the jobs that have finished have cost."""
    lost_seconds: dict[str, float] = field(default_factory=dict)
    """What a job loses on average when a device of a kind is taken away from it, by kind; nothing if not given."""
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

    def run_rounds(self, round_seconds: float, restarts: Mapping[str, float], reset_rounds: int, record: bool) -> None:
        scheduler, changed, again = RoundScheduler(self.kinds), True, 0.0
        self.lost_seconds = {name: seconds + round_seconds / 2 for name, seconds in restarts.items()}
        while self.waiting:
            if not self.running:
                # Rounds begin at multiples of their length, so the first one after the next arrival is next.
                behind = self.workload[self.arrived].seconds - self.clock
                self.clock += max(0, math.ceil(behind / round_seconds - 1e-9)) * round_seconds
            changed |= self._admit()
            if changed or self.clock >= again - 1e-9:
                scheduler.begin(self._decide(self._problem()))
                changed = False
                again = min(self.prices.next_change(self.clock), self.clock + reset_rounds * round_seconds)
                self.hourly = {kind.name: kind.price_per_hour for kind in self._priced_kinds()}
            leases = scheduler.next_round(kept=[name for name, job in self.running.items() if job.starting > 0])
            if not leases and self.arrived == len(self.workload):
                raise PlanError("simulate_fleet(policy=): expected a share for some job, found none: no job can finish")
            running = len(self.running)
            seconds = {
                lease.jobs: self._run_lease(lease, round_seconds, restarts[lease.kind], record) for lease in leases
            }
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
            allocation = self._decide(problem)
            seconds = allocation.seconds_left()
            coming = self.workload[self.arrived].seconds if self.arrived < len(self.workload) else math.inf
            span = min(float(seconds.min()), coming - self.clock, self.prices.next_change(self.clock) - self.clock)
            if not math.isfinite(span):
                raise PlanError("simulate_fleet(policy=): expected a share for some job, found none: no job can finish")
            rates, busy, isolated = allocation.throughputs(), allocation.busy(), problem.isolated_speeds()
            hourly = allocation.array() @ [kind.price_per_hour for kind in problem.kinds]
            paid = dict.fromkeys(range(len(problem.jobs)), 0.0)
            for price, members in zip(hourly.tolist(), problem.combinations, strict=True):
                for m in members:
                    paid[m] += price / len(members)
            for m, name in enumerate(list(self.running)):
                job = self.running[name]
                job.cost += paid[m] * problem.jobs[m].workers * span / 3600
                job.busy_seconds += float(busy[m]) * span
                job.isolated_seconds += rates[m] * span / isolated[m]
                job.left -= rates[m] * span
                if seconds[m] <= span * (1 + 1e-12) or job.left <= _ROUNDING * job.arrival.job.steps:
                    self._finish(name, self.clock + span)
            self.clock += span

    def _admit(self) -> bool:
        """Takes in the jobs that have arrived; says whether there are any."""
        first = self.arrived
        while self.arrived < len(self.workload) and self.workload[self.arrived].seconds <= self.clock + 1e-9:
            arrival = self.workload[self.arrived]
            self.running[arrival.job.name] = _Running(arrival, arrival.job.steps, region=arrival.job.region)
            names = [kind.name for kind in self.kinds]
            self.speeds[arrival.job.name] = dict(zip(names, arrival.throughputs, strict=True))
            self.arrived += 1
        return self.arrived > first

    def _decide(self, problem: Problem) -> Allocation:
        self.allocations += 1
        return decide(self.policy, problem, begun=self.allocations > 1)

    def _problem(self) -> Problem:
        """What the policy sees now. A deadline that has passed, or that no kind is fast enough for, is one no more."""
        jobs = []
        for running in self.running.values():
            job, age = running.arrival.job, self.clock - running.arrival.seconds
            if (deadline := job.deadline_seconds) is not None:
                left = deadline - age
                deadline = left if left * max(running.arrival.throughputs) >= running.left else None
            so_far: dict[str, Any] = {"steps": running.left, "isolated_seconds": running.isolated_seconds}
            so_far["elapsed_seconds"] = max(age, 0.0)
            jobs.append(replace(job, **so_far, deadline_seconds=deadline, region=running.region))
        rows = tuple(self._kept_speeds(running.arrival) for running in self.running.values())
        numbers = {name: number for number, name in enumerate(self.running)}
        pairs = []
        for (first, second), (one, two) in self.pairs.items():
            if first in numbers and second in numbers:
                (m, one), (n, two) = sorted([(numbers[first], one), (numbers[second], two)])
                pairs.append(Pair((m, n), (one, two)))
        paid = self.spent + sum(running.cost for running in self.running.values())
        budget = budget_left(self.budget, paid)
        return Problem(
            tuple(jobs), self._priced_kinds(), rows, pairs=tuple(pairs), entities=self.entities, budget=budget
        )

    def _kept_speeds(self, arrival: Arrival) -> tuple[float, ...]:
        """The throughputs of a job, less what it loses on average when its devices are taken away."""
        if not any(kind.preempted_every_seconds for kind in self.kinds):
            return arrival.throughputs
        losses = [
            arrival.job.workers * self.lost_seconds.get(kind.name, 0.0) / kind.preempted_every_seconds
            if kind.preempted_every_seconds
            else 0.0
            for kind in self.kinds
        ]
        return tuple(speed / (1 + loss) for speed, loss in zip(arrival.throughputs, losses, strict=True))

    def _priced_kinds(self) -> tuple[Kind, ...]:
        prices = [self.prices.at(kind.name, self.clock) for kind in self.kinds]
        return tuple(
            kind if price is None else replace(kind, price_per_hour=price)
            for kind, price in zip(self.kinds, prices, strict=True)
        )

    def _run_lease(self, lease: Lease, round_seconds: float, restart_seconds: float, record: bool) -> float:
        """Runs the jobs of a lease for a round, or to their ends; the seconds that they had their workers for.

        Of a pair one may end first; then the other has the devices for itself.
        """
        active = [self.running[name] for name in lease.jobs]
        taken = min(round_seconds, self._taken_after(lease))
        for job in active:
            if not lease.renewed or job.interrupted:
                job.restarts += job.busy_seconds > 0
                job.starting = restart_seconds
            job.interrupted = taken < round_seconds
            self._move(job, lease)
        spent = min(max(job.starting for job in active), taken)
        for job in active:
            self._charge(job, lease, spent / len(active))
            job.busy_seconds += spent
            job.starting -= min(job.starting, spent)
        while active and spent < taken:
            speeds = self._speeds_of(active, lease.kind)
            span = min(taken - spent, *(job.left / speed for job, speed in zip(active, speeds, strict=True)))
            ended = []
            for job, speed in zip(active, speeds, strict=True):
                steps = job.left if job.left / speed <= span else span * speed
                self._charge(job, lease, span / len(active))
                job.busy_seconds += span
                job.isolated_seconds += steps / self._isolated_speed(job)
                job.left -= steps
                if not job.left:
                    ended.append(job)
            spent += span
            for job in ended:
                active.remove(job)
                self._finish(job.arrival.job.name, self.clock + spent)
        if record:
            name = " + ".join(lease.jobs)
            self.held.append(Held(name, lease.devices, lease.workers, self.clock, self.clock + spent))
        return spent

    def _taken_after(self, lease: Lease) -> float:
        """The seconds until the first device of a lease is taken away. Its job is warned, and saves."""
        mean = next(kind.preempted_every_seconds for kind in self.kinds if kind.name == lease.kind)
        return math.inf if mean is None else float(self.random.exponential(mean / len(lease.workers)))

    def _move(self, job: _Running, lease: Lease) -> None:
        """Moves the data of a job to where its lease is, if it is elsewhere."""
        kind = next(kind for kind in self.kinds if kind.name == lease.kind)
        job.cost += moving_cost(job.arrival.job.gigabytes, job.region, kind, self.kinds)
        job.region = kind.region or job.region

    def _charge(self, job: _Running, lease: Lease, seconds: float) -> None:
        job.cost += self.hourly[lease.kind] * len(lease.workers) * seconds / 3600

    def _speeds_of(self, active: Sequence[_Running], kind: str) -> list[float]:
        """Steps per second of jobs that have the same workers: of one alone, or of a pair."""
        names = [job.arrival.job.name for job in active]
        if len(names) == 1:
            return [self.speeds[names[0]][kind]]
        column = [each.name for each in self.kinds].index(kind)
        first, second = names
        rows = self.pairs[first, second] if (first, second) in self.pairs else self.pairs[second, first][::-1]
        return [row[column] for row in rows]

    def _isolated_speed(self, job: _Running) -> float:
        """The throughput of a job if it had 1/n of every kind now."""
        count, size = len(self.running), job.arrival.job.workers
        shares = [kind.workers / count / size for kind in self.kinds]
        total = max(1.0, sum(share for share, speed in zip(shares, job.arrival.throughputs, strict=True) if speed))
        return sum(share * speed for share, speed in zip(shares, job.arrival.throughputs, strict=True)) / total

    def _finish(self, name: str, seconds: float) -> None:
        job = self.running.pop(name)
        self.spent += job.cost
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


def _check_throughputs(workload: Sequence[Arrival], kinds: Sequence[Kind], pairs: Shared) -> None:
    for arrival in workload:
        if len(arrival.throughputs) != len(kinds):
            raise PlanError(
                f"throughputs of {arrival.job.name!r}: expected {len(kinds)} numbers (one per kind), found "
                f"{len(arrival.throughputs)}: give one for each"
            )
    known = {arrival.job.name for arrival in workload}
    for names, rows in pairs.items():
        if not known.issuperset(names) or len(set(names)) < 2:
            raise PlanError(
                f"simulate_fleet(pairs=): expected the names of two jobs of the workload, found {names}: correct them"
            )
        if [len(row) for row in rows] != [len(kinds)] * 2:
            raise PlanError(
                f"simulate_fleet(pairs=): expected two rows of {len(kinds)} numbers (one per kind) for {names}, found "
                f"{rows}: give both"
            )
