"""Turns shares of time into rounds: who runs on which workers in the next round [Narayanan 2021, section 5.5].

A `RoundScheduler` is a state machine without a clock. Its events are a new allocation, the start of a round, and what
the leases of a round received. The same events lead to the same leases.

    priority = share of the kind's time in the allocation / share of the kind's time received so far

Rules of this file:
  1. In each round a job runs in one combination on one kind at most, on all of its workers or not at all.
  2. A combination that runs again on a kind keeps its workers: its lease is renewed, and nothing is saved or loaded.
  3. A combination without a share of a kind gets no lease of it, though one that it has may be kept.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy

from penstock.arguments import Entries, instance
from penstock.errors import PlanError
from penstock.fleet.allocations import Allocation
from penstock.fleet.jobs import Kind
from penstock.fleet.problems import Floats


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of a job, or of a pair, to its workers for one round."""

    jobs: tuple[str, ...]
    kind: str
    devices: str
    """The name of the pool, which is the kind's own unless it shares its devices."""
    workers: tuple[int, ...]
    """Numbers of devices in the pool, ascending."""
    renewed: bool
    """Whether it had the same workers in the round before."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A combination that runs in the next round, before it has workers."""

    jobs: tuple[str, ...]
    kind: Kind
    size: int


class RoundScheduler:
    """Decides round by round who runs, so that the time received comes close to the shares of an allocation."""

    def __init__(self, kinds: Sequence[Kind], leases: Sequence[Lease] = ()) -> None:
        """`leases`: those of the current round, if something else has begun it."""
        rule = Entries(instance(Kind, "a Kind", "build one"))
        self._kinds: tuple[Kind, ...] = rule.check("RoundScheduler(kinds=)", kinds, PlanError)
        self._pools = {kind.devices: kind for kind in self._kinds}
        self._allocation: Allocation | None = None
        self._rows: dict[tuple[str, ...], int] = {}
        self._shares: Floats = numpy.zeros((0, len(self._kinds)))
        self._received, self._owed = self._shares.copy(), self._shares.copy()
        self._leases = tuple(leases)

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases of the current round."""
        return self._leases

    def begin(self, allocation: Allocation) -> None:
        """Follows `allocation` from now on. What was received under the last one is forgotten, as its shares are; what
        it still owes decides who comes first, since new allocations may follow each other faster than rounds.
        """
        rule = instance(Allocation, "an Allocation", "give that of a policy")
        problem = rule.check("RoundScheduler.begin(allocation=)", allocation, PlanError).problem
        # Prices may change, and machines may come and go.
        if [kind.name for kind in problem.kinds] != [kind.name for kind in self._kinds]:
            raise PlanError("RoundScheduler.begin(allocation=): expected the kinds of this scheduler: make a new one")
        owed = {
            (jobs, kind.name): lack
            for jobs, lacks in zip(self._rows, self._deficits().tolist(), strict=True)
            for kind, lack in zip(self._kinds, lacks, strict=True)
        }
        self._allocation = allocation
        names = [job.name for job in problem.jobs]
        self._rows = {tuple(names[m] for m in members): row for row, members in enumerate(problem.combinations)}
        self._sizes = [problem.jobs[members[0]].workers for members in problem.combinations]
        self._shares = allocation.array()
        self._received = numpy.zeros_like(self._shares)
        self._owed = numpy.array(
            [[owed.get((jobs, kind.name), 0.0) for kind in self._kinds] for jobs in self._rows], dtype=float
        )

    def received(self) -> Floats:
        """Seconds since `begin`, in the order of the allocation's shares."""
        return self._received.copy()

    def next_round(
        self,
        running: Iterable[str] | None = None,
        kept: Iterable[str] = (),
        absent: Mapping[str, Collection[int]] = MappingProxyType({}),
    ) -> tuple[Lease, ...]:
        """The leases of the next round. `running`: the jobs that may run; all of the allocation by default. `kept`: the
        jobs whose leases go on whatever their priority, since they have not got anywhere yet. `absent`: the workers
        that are not there, by the name of the devices.
        """
        if self._allocation is None:
            return ()
        self._absent = {name: frozenset(absent.get(name, ())) for name in self._pools}
        self._leases = tuple(lease for lease in self._leases if self._absent[lease.devices].isdisjoint(lease.workers))
        jobs = {job.name for job in self._allocation.problem.jobs}
        may_run = jobs if running is None else jobs & set(running)
        held = may_run.intersection(kept)
        going = [lease for lease in self._leases if held.intersection(lease.jobs) and may_run.issuperset(lease.jobs)]
        self._leases = self._place(self._choose(may_run, going), going)
        return self._leases

    def end_round(self, seconds: Mapping[tuple[str, ...], float]) -> None:
        """Takes note of the seconds that combinations of the current round ran for."""
        for lease in self._leases:
            if lease.jobs in self._rows:
                column = next(j for j, kind in enumerate(self._kinds) if kind.name == lease.kind)
                self._received[self._rows[lease.jobs], column] += seconds.get(lease.jobs, 0.0)

    def priorities(self) -> Floats:
        """The part of each kind's time that a combination has in the allocation, over the part that it has received:
        infinite if it received nothing yet, 0 without a share.

        Both are parts of all time that the kind gives to combinations, so that kinds of many workers do not come first.
        """
        with numpy.errstate(divide="ignore", invalid="ignore"):
            target = self._shares / self._shares.sum(axis=0)
            so_far = self._received / self._received.sum(axis=0)
            ratio = numpy.where(so_far > 0, target / so_far, numpy.inf)
        return numpy.where(self._shares > 0, ratio, 0.0)

    def _deficits(self) -> Floats:
        """Seconds that combinations lack of their part of what each kind gave, under this and earlier allocations."""
        part = self._shares / numpy.maximum(self._shares.sum(axis=0), 1e-300)
        return numpy.asarray(self._owed + part * self._received.sum(axis=0) - self._received)

    def _choose(self, running: set[str], going: Sequence[Lease]) -> list[_Choice]:
        """The combinations of `going`, then the others by falling priority, without those that do not fit or share a
        job with an earlier one.
        """
        kinds = {kind.name: kind for kind in self._kinds}
        chosen = [_Choice(lease.jobs, kinds[lease.kind], len(lease.workers)) for lease in going]
        taken = {job for lease in going for job in lease.jobs}
        rows, columns = numpy.nonzero(self._shares)
        first = self.priorities()[rows, columns]
        deficit = self._deficits()[rows, columns]
        # Ties go to the combination that lacks most time, then to the larger share, then to the earlier job.
        order = numpy.lexsort((columns, rows, -self._shares[rows, columns], -deficit, -first))
        free = {name: kind.workers - len(self._absent[name]) for name, kind in self._pools.items()}
        for lease in going:
            free[lease.devices] -= len(lease.workers)
        names = list(self._rows)
        for index in order.tolist():
            jobs, kind, size = names[rows[index]], self._kinds[columns[index]], self._sizes[rows[index]]
            if size > free[kind.devices] or not running.issuperset(jobs) or not taken.isdisjoint(jobs):
                continue
            free[kind.devices] -= size
            taken.update(jobs)
            chosen.append(_Choice(jobs, kind, size))
            if not any(free.values()):
                break
        return chosen

    def _place(self, chosen: Sequence[_Choice], going: Sequence[Lease]) -> tuple[Lease, ...]:
        """Workers for the chosen combinations: those of the last round where they are the same, then by size."""
        before = {(lease.jobs, lease.kind): lease.workers for lease in self._leases}
        placed = self._placed(chosen, before)
        if placed is None:
            # What stayed in its place left no server free for a job that needs one.
            placed = self._placed(chosen, {(lease.jobs, lease.kind): lease.workers for lease in going}, before)
        return tuple(sorted(placed or (), key=lambda lease: (lease.devices, lease.workers)))

    def _placed(
        self,
        chosen: Sequence[_Choice],
        kept: Mapping[tuple[tuple[str, ...], str], tuple[int, ...]],
        before: Mapping[tuple[tuple[str, ...], str], tuple[int, ...]] | None = None,
    ) -> list[Lease] | None:
        """Leases for all of `chosen`. With `before` those that need one server and find none get no lease; without it
        there is no answer then.
        """
        free = {name: set(range(kind.workers)) - self._absent[name] for name, kind in self._pools.items()}
        leases, moved = [], []
        for choice in chosen:
            workers = kept.get((choice.jobs, choice.kind.name))
            if workers is None:
                moved.append(choice)
                continue
            free[choice.kind.devices] -= set(workers)
            leases.append(Lease(choice.jobs, choice.kind.name, choice.kind.devices, workers, renewed=True))
        for choice in sorted(moved, key=lambda choice: (not choice.kind.consolidated, -choice.size)):
            found = _fewest_servers(free[choice.kind.devices], choice)
            if found is None:
                if before is None:
                    return None
                continue
            free[choice.kind.devices] -= set(found)
            renewed = before is not None and before.get((choice.jobs, choice.kind.name)) == found
            leases.append(Lease(choice.jobs, choice.kind.name, choice.kind.devices, found, renewed))
        return leases


def _fewest_servers(free: set[int], choice: _Choice) -> tuple[int, ...] | None:
    """Free workers on few servers: one that fits as exactly as possible, or else the emptiest ones. None if a
    consolidated kind would need more servers than its workers fill.
    """
    per_server = choice.kind.workers_per_server
    if per_server is None:
        return tuple(sorted(free)[: choice.size])
    servers: dict[int, list[int]] = {}
    for worker in sorted(free):
        servers.setdefault(worker // per_server, []).append(worker)
    fitting = [found for found in servers.values() if len(found) >= choice.size]
    if fitting:
        return tuple(min(fitting, key=len)[: choice.size])
    by_space = sorted(servers.values(), key=len, reverse=True)
    least = -(-choice.size // per_server)
    if choice.kind.consolidated and sum(map(len, by_space[:least])) < choice.size:
        return None
    return tuple(sorted([worker for found in by_space for worker in found][: choice.size]))
