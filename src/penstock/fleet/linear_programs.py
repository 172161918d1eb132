"""Linear programs over the valid allocations of a problem, solved by HiGHS through scipy.

A `Space` has one variable for each combination of jobs and kind that it can run on, and the constraints of every
policy [Narayanan 2021, equations 5.1 to 5.3]: the time of each job, and the workers of each pool. A policy adds its own
with a `Program`.

Jobs that no policy could tell apart form a class and share their variables: the mean of their shares in any optimum is
an optimum, too. Of 26 types of jobs, 500 jobs make a program as small as 26.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy
import numpy.typing

from penstock.errors import PenstockError, PlanError
from penstock.fleet.allocations import Allocation
from penstock.fleet.problems import Floats, Problem

_OPTIONS = {"primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9}
"""The solver's usual tolerances, 1e-7, would show in the results."""

Indices = numpy.typing.NDArray[numpy.intp]
Entries = tuple[Indices, Indices, Floats]
"""Rows, columns and values of a sparse matrix."""


class Infeasible(PlanError):
    """No allocation meets all constraints of a policy."""


class OutOfReach(PlanError):
    """A policy cannot keep what it promises, such as all deadlines. `nearest` finds the allocation that misses least:
    a run that has begun goes on with it.
    """

    def __init__(self, message: str, nearest: Callable[[], Allocation]) -> None:
        super().__init__(message)
        self.nearest = nearest


class Space:
    """The valid allocations of a problem as variables of a linear program, and back."""

    def __init__(self, problem: Problem, keys: Sequence[Hashable] | None = None) -> None:
        """`keys`: jobs of equal key, workers and throughputs share their variables; None: no two jobs do. Problems with
        pairs keep all jobs apart.
        """
        self.problem = problem
        jobs = range(len(problem.jobs))
        if keys is None or problem.pairs:
            signs: list[Hashable] = list(jobs)
        else:
            signs = [(keys[m], problem.jobs[m].workers, problem.throughputs[m]) for m in jobs]
        numbers: dict[Hashable, int] = {}
        self.class_of: Indices = numpy.array([numbers.setdefault(sign, len(numbers)) for sign in signs])
        """The class of each job."""
        self.counts: Floats = numpy.bincount(self.class_of).astype(float)
        """The jobs of each class."""
        self.first: Indices = numpy.unique(self.class_of, return_index=True)[1]
        """A job of each class."""
        self.classes = len(self.counts)
        self.fastest: Floats = problem.speeds().max(axis=1)[self.first]
        """The throughput of a job of each class on its fastest kind; no program has larger numbers than 1 for it."""
        self.workers: Floats = problem.workers()[self.first]
        """The workers of one job of each class."""
        self._make_variables()

    def _make_variables(self) -> None:
        problem = self.problem
        speeds = problem.speeds()[self.first]
        row, kind = numpy.nonzero(speeds)
        rates = [(row, numpy.arange(len(row)), speeds[row, kind] / self.fastest[row])]
        time = [(row, numpy.arange(len(row)), numpy.ones(len(row)))]
        sizes, together = self.workers[row], self.counts[row]
        for index, pair in enumerate(problem.pairs):
            (runs,) = numpy.nonzero(numpy.array(pair.throughputs[0]))
            columns = len(row) + numpy.arange(len(runs))
            row = numpy.concatenate([row, numpy.full(len(runs), len(problem.jobs) + index)])
            kind = numpy.concatenate([kind, runs])
            sizes = numpy.concatenate([sizes, numpy.full(len(runs), float(problem.jobs[pair.jobs[0]].workers))])
            together = numpy.concatenate([together, numpy.ones(len(runs))])
            for m, speed in zip(pair.jobs, pair.throughputs, strict=True):
                at = numpy.full(len(runs), m)
                rates.append((at, columns, numpy.array(speed)[runs] / self.fastest[m]))
                time.append((at, columns, numpy.ones(len(runs))))
        self.row, self.kind = row, kind
        """The class of each variable, or for a pair its row of the allocation, and its kind."""
        self.sizes, self.taken = sizes, sizes * together
        """The workers of one job, and of all jobs of the class, for each variable."""
        self.rates = _joined(rates)
        """The normalized throughput of a job of each class, for each variable."""
        self.time = _joined(time)

    @property
    def variables(self) -> int:
        """How many there are."""
        return len(self.row)

    def hourly_prices(self) -> Floats:
        """The price of one device of its kind for an hour, for each variable."""
        prices: Floats = numpy.array([kind.price_per_hour for kind in self.problem.kinds])[self.kind]
        return prices

    def total_rates(self, weights: Floats) -> Floats:
        """The sum over all jobs of normalized throughputs times the weight of their class, for each variable."""
        rows, columns, values = self.rates
        total = numpy.zeros(self.variables)
        numpy.add.at(total, columns, values * (weights * self.counts)[rows])
        return total

    def of_jobs(self, numbers: Sequence[float] | Floats) -> Floats:
        """The number of each class, of numbers that are equal within a class."""
        return numpy.asarray(numbers, dtype=float)[self.first]

    def allocation(self, shares: Floats, policy: str, least: float = 1e-10) -> Allocation:
        """The allocation of these values of the variables, without the solver's rounding errors: those of `least` or
        below are 0.
        """
        problem = self.problem
        table = numpy.zeros((self.classes + len(problem.pairs), len(problem.kinds)))
        table[self.row, self.kind] = numpy.where(shares > least, numpy.minimum(shares, 1.0), 0.0)
        rows = numpy.concatenate([table[: self.classes][self.class_of], table[self.classes :]])
        return Allocation(problem, tuple(map(tuple, _shrunk(rows, problem).tolist())), policy)


@dataclass(frozen=True, slots=True)
class Solution:
    """An optimum of a program."""

    shares: Floats
    """The variables of the space."""
    extra: Floats
    """The variables that the policy added."""
    value: float
    """What was maximized."""
    rates: Floats
    """The normalized throughput of each class."""
    held: Floats
    """How much the optimum would grow if the throughput of a class had to be less: 0 for a class that could have
    more. It is 0 everywhere if no throughput is constrained."""


class Program:
    """A linear program over a space: valid allocations with further variables and constraints."""

    def __init__(self, space: Space, extra: int = 0) -> None:
        """`extra`: the number of variables beside those of the space. None is less than 0."""
        self._space = space
        self._extra = extra
        pools = list(space.problem.pools)
        pool_of = numpy.array([pools.index(kind.devices) for kind in space.problem.kinds])
        self._entries: list[Entries] = [space.time]
        self._bounds: list[Floats] = [numpy.ones(space.classes)]
        self._rows = space.classes
        self._throughput_rows: slice | None = None
        self._units = numpy.ones(space.classes)
        self.at_most(
            (pool_of[space.kind], numpy.arange(space.variables), space.taken),
            numpy.array([float(space.problem.pools[name]) for name in pools]),
        )

    def at_most(self, left: Entries, bounds: Floats) -> None:
        """Adds constraints: `left`, of the variables of the space and then of the extra ones, is at most `bounds`."""
        rows, columns, values = left
        self._entries.append((rows + self._rows, columns, values))
        self._bounds.append(bounds)
        self._rows += len(bounds)

    def throughputs_at_least(self, bounds: Floats, extra: Floats | None = None) -> None:
        """Each class has a normalized throughput of at least its bound, plus its number in `extra` times the first
        extra variable.
        """
        rows, columns, values = self._space.rates
        # A tolerance is absolute, and a slow job's throughput is small: each row has a number of 1.
        largest = bounds if extra is None else numpy.maximum(bounds, extra)
        self._units = numpy.where(largest > 0, largest, 1.0)
        left = [(rows, columns, -values / self._units[rows])]
        if extra is not None:
            (there,) = numpy.nonzero(extra)
            left.append((there, numpy.full(len(there), self._space.variables), (extra / self._units)[there]))
        self._throughput_rows = slice(self._rows, self._rows + len(bounds))
        self.at_most(_joined(left), -bounds / self._units)

    def longer_time(self, column: int) -> None:
        """Makes the variables of the space durations, in place of shares of time: the extra variable `column` is the
        duration of the whole, in place of 1.
        """
        bounds = numpy.concatenate(self._bounds[:2])
        rows = numpy.arange(len(bounds))
        self._entries.append((rows, numpy.full(len(bounds), self._space.variables + column), -bounds))
        self._bounds[:2] = [numpy.zeros(len(bounds))]

    def maximize(self, objective: Floats) -> Solution:
        """The optimum of `objective`, whose numbers are those of the space's variables, then the extra ones.

        Raises `Infeasible`, or `PenstockError` if the solver fails.
        """
        optimize, sparse = scipy_module("optimize"), scipy_module("sparse")
        rows, columns, values = _joined(self._entries)
        matrix = sparse.csr_array((values, (rows, columns)), shape=(self._rows, self._space.variables + self._extra))
        found = optimize.linprog(
            -objective, A_ub=matrix, b_ub=numpy.concatenate(self._bounds), method="highs", options=_OPTIONS
        )
        if found.status == 2:
            raise Infeasible("no allocation meets all constraints of the policy: relax one")
        if found.status != 0:
            raise PenstockError(
                f"linear program of {matrix.shape[1]} variables: expected an optimum, found status {found.status} of "
                f"HiGHS, {found.message}: check that throughputs, steps and prices have sensible sizes"
            )
        shares = found.x[: self._space.variables]
        rates = numpy.zeros(self._space.classes)
        rows, columns, values = self._space.rates
        numpy.add.at(rates, rows, values * shares[columns])
        held = numpy.zeros(self._space.classes)
        if self._throughput_rows is not None:
            held = -found.ineqlin.marginals[self._throughput_rows] / self._units
        return Solution(shares, found.x[self._space.variables :], float(-found.fun), rates, held)


def _joined(parts: Sequence[Entries]) -> Entries:
    rows, columns, values = (numpy.concatenate([part[index] for part in parts]) for index in range(3))
    return rows, columns, values


def _shrunk(rows: Floats, problem: Problem) -> Floats:
    """`rows` times the factor, all but 1, that undoes what the solver's tolerance let them exceed."""
    busy = rows[: len(problem.jobs)].sum(axis=1)
    for index, pair in enumerate(problem.pairs):
        busy[list(pair.jobs)] += rows[len(problem.jobs) + index].sum()
    worst, sizes = max(1.0, float(busy.max())), problem.sizes()
    for name, workers in problem.pools.items():
        columns = [j for j, kind in enumerate(problem.kinds) if kind.devices == name]
        worst = max(worst, float((rows[:, columns].sum(axis=1) * sizes).sum()) / workers)
    return rows / worst


def scipy_module(module: str) -> ModuleType:
    """A module of scipy. Raises `PenstockError` if it is not installed."""
    import importlib

    try:
        return importlib.import_module(f"scipy.{module}")
    except ImportError as missing:
        raise PenstockError(
            "penstock.fleet: expected scipy, whose HiGHS solves the policies, found none: "
            "install it with `pip install 'penstock[fleet]'`"
        ) from missing


_SLACK = 1e-8
"""The second program may miss the optimum of the first by this share, since both are met up to a tolerance only."""


def fill(space: Space, solution: Solution, *, at_least: Floats, weights: Floats | None = None) -> Floats:
    """The shares that make the weighted sum of all normalized throughputs largest, of those where no class has less
    than `at_least`. An objective such as a maximum of minima has many optima, most of which leave workers idle.

    `solution`: an optimum that is kept if no other is found within the tolerance. `weights`: by default the workers of
    a job.
    """
    program = Program(space)
    program.throughputs_at_least(at_least * (1 - _SLACK))
    try:
        return program.maximize(space.total_rates(space.workers if weights is None else weights)).shares
    except Infeasible:
        return solution.shares
