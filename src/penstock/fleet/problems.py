"""What a policy decides about: jobs, kinds of devices, and how fast each job runs on each kind.

throughputs    V100   K80
job 0            40    10     steps per second
job 1            12     4
pair (0, 1)   20, 7   6, 2    both at a time on the same devices
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import numpy.typing

from penstock.arguments import entries, instance, number, text_of
from penstock.errors import PlanError
from penstock.fleet.jobs import Entity, Job, Kind

Floats = numpy.typing.NDArray[numpy.float64]

_SPEED = number(0, unit="steps per second").but("give 0 or None where the job cannot run").optional
_BUDGET = number(above=0).but("give the most that all jobs together may cost, or leave it out").optional


def budget_left(budget: float | None, paid: float) -> float | None:
    """What is left of `budget` after `paid`, a little where delays have used it up; None if there is no budget."""
    return None if budget is None else max(budget - paid, 1e-6 * budget)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two jobs that share the same devices at the same time (space sharing)."""

    jobs: tuple[int, int]
    """Their numbers in the problem, ascending."""
    throughputs: tuple[tuple[float, ...], tuple[float, ...]]
    """The steps per second of each of the two on each kind while both run; 0 where the pair cannot run."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Jobs in the order of their arrival, kinds, and the throughput of each job on each kind.

    A throughput is in steps per second on all workers of the job together. It is 0 where the job cannot run; None is
    taken for 0, and so is a kind that has fewer devices than the job takes.
    """

    jobs: tuple[Job, ...]
    kinds: tuple[Kind, ...]
    throughputs: tuple[tuple[float, ...], ...]
    pairs: tuple[Pair, ...] = ()
    entities: tuple[Entity, ...] = ()
    budget: float | None = None
    """The most that all jobs together may cost from now until they are done. Only `min_makespan_within_budget` reads
    it."""

    def __post_init__(self) -> None:
        for name, kind in (("jobs", Job), ("kinds", Kind), ("pairs", Pair), ("entities", Entity)):
            found = entries(name, getattr(self, name), PlanError)
            rule = instance(kind, f"a {kind.__name__}", "build one")
            object.__setattr__(self, name, tuple(rule.check(name, value, PlanError) for value in found))
        if not self.jobs or not self.kinds:
            raise PlanError("Problem: expected one job and one kind or more, found none: there is nothing to decide")
        for values in (self.jobs, self.kinds, self.entities):
            _check_names([value.name for value in values])
        _check_pools(self.kinds)
        object.__setattr__(self, "budget", _BUDGET.check("budget", self.budget, PlanError))
        object.__setattr__(self, "throughputs", self._checked_throughputs())
        object.__setattr__(self, "pairs", tuple(self._checked_pair(pair) for pair in self.pairs))
        known = {entity.name for entity in self.entities}
        for job in self.jobs:
            if known and job.entity not in known:
                raise PlanError(
                    f"job {job.name!r}: entity: expected one of {', '.join(sorted(known))}, found {job.entity!r}: "
                    "name one of them, or add the entity to the problem"
                )

    @property
    def pools(self) -> dict[str, int]:
        """The number of workers by the name of the devices; kinds that share devices count once."""
        return {kind.devices: kind.workers for kind in self.kinds}

    @property
    def combinations(self) -> tuple[tuple[int, ...], ...]:
        """The jobs of each row of an allocation: each job alone, then the pairs."""
        return (*((m,) for m in range(len(self.jobs))), *(pair.jobs for pair in self.pairs))

    def sizes(self) -> Floats:
        """The workers that each of the `combinations` takes."""
        return numpy.array([self.jobs[members[0]].workers for members in self.combinations], dtype=float)

    def speeds(self) -> Floats:
        """`throughputs` as an array: a row for each job, a column for each kind."""
        return numpy.array(self.throughputs, dtype=float)

    def workers(self) -> Floats:
        """The workers that each job takes."""
        return numpy.array([job.workers for job in self.jobs], dtype=float)

    def equal_shares(self) -> Floats:
        """The time on each kind of a job that spends the same time on each worker: Xequal of [Narayanan 2021, section
        5.4.1]. Kinds of one pool share the time of their workers equally.
        """
        pools, together = self.pools, [kind.devices for kind in self.kinds]
        total = sum(pools.values())
        return numpy.array([pools[name] / total / together.count(name) for name in together])

    def isolated_shares(self) -> Floats:
        """The shares of each job if each of n had 1/n of the fleet: Xisolated, a row for each job. A job cannot use
        more than all of its time, which matters where there are fewer jobs than workers.
        """
        pools, together = self.pools, [kind.devices for kind in self.kinds]
        owned = numpy.array([pools[name] / together.count(name) for name in together]) / len(self.jobs)
        rows = owned[None, :] / self.workers()[:, None] * (self.speeds() > 0)
        rows /= numpy.maximum(1.0, rows.sum(axis=1, keepdims=True))
        return numpy.asarray(rows)

    def isolated_speeds(self) -> Floats:
        """The steps per second of each job with its `isolated_shares`."""
        return numpy.asarray((self.speeds() * self.isolated_shares()).sum(axis=1))

    def _checked_throughputs(self) -> tuple[tuple[float, ...], ...]:
        rows = entries("throughputs", self.throughputs, PlanError)
        if len(rows) != len(self.jobs):
            raise PlanError(
                f"throughputs: expected {len(self.jobs)} rows (one per job), found {len(rows)}: give one for each"
            )
        # Jobs of one type often have the same row, and a simulation makes thousands of problems.
        checked: dict[tuple[int, int], tuple[float, ...]] = {}
        for job, row in zip(self.jobs, rows, strict=True):
            if (id(row), job.workers) not in checked:
                checked[id(row), job.workers] = self._checked_row(job, row)
        return tuple(checked[id(row), job.workers] for job, row in zip(self.jobs, rows, strict=True))

    def _checked_row(self, job: Job, row: object) -> tuple[float, ...]:
        if not any(checked := self._speeds_of(job, row)):
            most = max(kind.workers for kind in self.kinds)
            raise PlanError(
                f"job {job.name!r}: expected a kind that it runs on, found none: it takes {job.workers} workers, the "
                f"largest kind has {most}, and its throughputs are {text_of(row)}. Leave the job out, or give it fewer "
                "workers"
            )
        return checked

    def _speeds_of(self, job: Job, row: object) -> tuple[float, ...]:
        where = f"throughputs of job {job.name!r}"
        found = entries(where, row, PlanError)
        if len(found) != len(self.kinds):
            raise PlanError(
                f"{where}: expected {len(self.kinds)} numbers (one per kind), found {len(found)}: give one for each"
            )
        checked = [_SPEED.check(where, value, PlanError) or 0.0 for value in found]
        return tuple(
            speed if job.workers <= kind.workers else 0.0 for speed, kind in zip(checked, self.kinds, strict=True)
        )

    def _checked_pair(self, pair: Pair) -> Pair:
        jobs = entries("pair: jobs", pair.jobs, PlanError)
        if (
            len(jobs) != 2
            or not all(isinstance(m, int) and 0 <= m < len(self.jobs) for m in jobs)
            or jobs[0] >= jobs[1]
        ):
            raise PlanError(
                f"pair: expected the numbers of two jobs of 0 to {len(self.jobs) - 1}, ascending, found "
                f"{text_of(pair.jobs)}: a pair is two different jobs"
            )
        first, second = (self.jobs[m] for m in jobs)
        if first.workers != second.workers:
            raise PlanError(
                f"pair of {first.name!r} and {second.name!r}: expected jobs with equally many workers, found "
                f"{first.workers} and {second.workers}: pair others, since the two share each of their workers"
            )
        rows = entries(f"pair of {first.name!r} and {second.name!r}: throughputs", pair.throughputs, PlanError)
        if len(rows) != 2:
            raise PlanError(f"pair of {first.name!r} and {second.name!r}: expected two rows, found {len(rows)}")
        one, two = self._speeds_of(first, rows[0]), self._speeds_of(second, rows[1])
        both = [bool(a and b) for a, b in zip(one, two, strict=True)]
        kept = tuple(tuple(s if b else 0.0 for s, b in zip(row, both, strict=True)) for row in (one, two))
        return Pair((jobs[0], jobs[1]), (kept[0], kept[1]))


def _check_names(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        again = next(name for index, name in enumerate(names) if name in names[:index])
        raise PlanError(f"{again!r}: expected names that differ, found this one twice: rename one")


def _check_pools(kinds: Sequence[Kind]) -> None:
    """Raises `PlanError` unless kinds of the same devices agree about them."""
    sizes: dict[str, tuple[int, int | None]] = {}
    for kind in kinds:
        size = (kind.workers, kind.workers_per_server)
        if sizes.setdefault(kind.devices, size) != size:
            raise PlanError(
                f"kind {kind.name!r}: expected workers and workers_per_server of the other kinds of the pool "
                f"{kind.devices!r}, {sizes[kind.devices]}, found {size}: they are the same devices"
            )
