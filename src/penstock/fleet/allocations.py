"""The answer of a policy: the share of time that each job spends on each kind, and what limits each job."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy

from penstock.arguments import TEXT, check_fields, entries, instance
from penstock.errors import PlanError, counted, visible
from penstock.fleet.problems import Floats, Problem
from penstock.values.quantities import table_lines

_NEAR = 1e-6
"""A solver meets its constraints up to about this much of a worker or of a job's time."""


_RULES = {"problem": instance(Problem, "a Problem", "build one"), "policy": TEXT.but("give the policy's name")}


@dataclass(frozen=True, slots=True)
class Allocation:
    """Shares of wall-clock time: row k, column j of `shares` is the part of the time for which combination k of the
    problem (each job alone, then the pairs) runs on kind j.

    It is valid: no job runs for more than all of the time, and no kind has more work than workers.
    """

    problem: Problem
    shares: tuple[tuple[float, ...], ...]
    policy: str = ""
    """The name of the policy that made it."""

    def __post_init__(self) -> None:
        check_fields(self, _RULES, PlanError, " in an Allocation")
        object.__setattr__(self, "shares", tuple(tuple(row) for row in entries("shares", self.shares, PlanError)))
        shape = (len(self.problem.jobs) + len(self.problem.pairs), len(self.problem.kinds))
        found = self.array()
        if found.shape != shape:
            raise PlanError(
                f"shares: expected {shape[0]} rows of {shape[1]} numbers, found {found.shape}: give them all"
            )
        if not (numpy.isfinite(found).all() and (found >= 0).all()):
            raise PlanError("shares: expected numbers of 0 or more, found another: a share is a part of the time")
        for job, time in zip(self.problem.jobs, self.busy(), strict=True):
            if time > 1 + _NEAR:
                raise PlanError(
                    f"shares of job {job.name!r}: expected at most all of the time, 1, found {time:.6g}: give it less"
                )
        for name, used in self.used().items():
            if used > self.problem.pools[name] * (1 + _NEAR):
                raise PlanError(
                    f"shares of {name!r}: expected at most {counted(self.problem.pools[name], 'worker')}, found "
                    f"{used:.6g}: give some job less"
                )

    def array(self) -> Floats:
        """`shares` as an array."""
        return numpy.array(self.shares, dtype=float).reshape(len(self.shares), -1)

    def busy(self) -> Floats:
        """The share of time for which each job runs, alone or in a pair."""
        rows, jobs = self.array().sum(axis=1), len(self.problem.jobs)
        busy: Floats = rows[:jobs].copy()
        for pair, time in zip(self.problem.pairs, rows[jobs:], strict=True):
            busy[list(pair.jobs)] += time
        return busy

    def throughputs(self) -> Floats:
        """The steps per second of each job, over time: its effective throughput."""
        found, jobs = self.array(), len(self.problem.jobs)
        speeds: Floats = (found[:jobs] * self.problem.speeds()).sum(axis=1)
        for pair, row in zip(self.problem.pairs, found[jobs:], strict=True):
            for m, speed in zip(pair.jobs, pair.throughputs, strict=True):
                speeds[m] += row @ numpy.array(speed)
        return speeds

    def normalized(self) -> Floats:
        """Throughputs over those of an equal time on each worker: what fairness compares."""
        equal: Floats = self.problem.speeds() @ self.problem.equal_shares()
        return self.throughputs() / equal

    def used(self) -> dict[str, float]:
        """The workers that are busy on average, by the name of their devices."""
        found, used = self.array() * self.problem.sizes()[:, None], dict.fromkeys(self.problem.pools, 0.0)
        for column, kind in enumerate(self.problem.kinds):
            used[kind.devices] += float(found[:, column].sum())
        return used

    def cost_per_hour(self) -> float:
        """What the busy workers cost."""
        prices = numpy.array([kind.price_per_hour for kind in self.problem.kinds])
        return float((self.array() * self.problem.sizes()[:, None] @ prices).sum())

    def seconds_left(self) -> Floats:
        """The time that each job takes to finish at this throughput; infinite for one that gets none."""
        steps = numpy.array([job.steps for job in self.problem.jobs])
        with numpy.errstate(divide="ignore"):
            return steps / self.throughputs()

    def limits(self) -> tuple[str, ...]:
        """What keeps each job from running faster, in words."""
        used, busy = self.used(), self.busy()
        full = {name for name, most in self.problem.pools.items() if used[name] > most * (1 - 1e-4)}
        return tuple(self._limit(m, full, busy[m] > 1 - 1e-4) for m in range(len(self.problem.jobs)))

    def explain(self) -> str:
        """A table: the shares of each job, its throughput, and what limits it."""
        kinds = self.problem.kinds
        head = ("job", *(visible(kind.name) for kind in kinds), "steps/s", "of equal", "limited by")
        columns = zip(self.problem.jobs, self.throughputs(), self.normalized(), self.limits(), strict=True)
        found, rows = self.array(), [head]
        for m, (job, speed, normal, limit) in enumerate(columns):
            cells = (f"{share:.3f}" if share else "-" for share in found[m])
            rows.append((visible(job.name), *cells, f"{speed:.4g}", f"{normal:.3f}x", limit))
        for pair, row in zip(self.problem.pairs, found[len(self.problem.jobs) :], strict=True):
            if row.any():
                names = " + ".join(visible(self.problem.jobs[m].name) for m in pair.jobs)
                rows.append((names, *(f"{share:.3f}" if share else "-" for share in row), "", "", "a pair"))
        table = "\n".join(table_lines(rows, left={0, len(rows[0]) - 1}))
        use = ", ".join(
            f"{visible(name)} {used:.4g} of {self.problem.pools[name]}" for name, used in self.used().items()
        )
        cost = f"; {self.cost_per_hour():.4g} per hour" if any(kind.price_per_hour for kind in kinds) else ""
        return f"{table}\nbusy workers: {use}{cost}"

    def _limit(self, m: int, full: set[str], always: bool) -> str:
        """What limits job `m`: its own speed, or devices that are `full`. `always`: it runs all of the time."""
        speeds, own = self.problem.throughputs[m], self.array()[m]
        runnable = [j for j, speed in enumerate(speeds) if speed]
        best = max(speeds)
        slowest = min((speeds[j] for j in runnable if own[j] > _NEAR), default=0.0)
        if always and slowest >= best * (1 - 1e-9):
            return "nothing: it has its fastest kind all of the time"
        faster = [j for j in runnable if not always or speeds[j] > slowest]
        names = list(dict.fromkeys(self.problem.kinds[j].devices for j in faster))
        taken = [name for name in names if name in full]
        if len(taken) == len(names):
            what = f"{', '.join(map(visible, names))}: no worker is free"
            return f"{what}; it runs all of the time" if always else what
        free = ", ".join(visible(name) for name in names if name not in full)
        return f"the policy: {free} has free time"

    def as_document(self) -> dict[str, Any]:
        """The allocation as plain values, for JSON."""
        kinds = [kind.name for kind in self.problem.kinds]
        shares = [dict(zip(kinds, row, strict=True)) for row in self.shares]
        names = [job.name for job in self.problem.jobs]
        columns = (self.throughputs().tolist(), self.seconds_left().tolist(), self.limits())
        heads = ("job", "shares", "steps_per_second", "seconds_left", "limited_by")
        rows = zip(names, shares[: len(names)], *columns, strict=True)
        jobs = [dict(zip(heads, row, strict=True)) for row in rows]
        both = ([names[m] for m in pair.jobs] for pair in self.problem.pairs)
        pairs = [{"jobs": two, "shares": row} for two, row in zip(both, shares[len(names) :], strict=True)]
        head = {"policy": self.policy, "jobs": jobs, "pairs": pairs}
        return {**head, "busy_workers": self.used(), "cost_per_hour": self.cost_per_hour()}


def for_problems(policy: Callable[[Problem], Allocation]) -> Callable[[Problem], Allocation]:
    """`policy`, which refuses what is no `Problem` with a `PlanError`."""

    @wraps(policy)
    def checked(problem: Problem) -> Allocation:
        _RULES["problem"].check("policy(problem=)", problem, PlanError)
        return policy(problem)

    return checked
