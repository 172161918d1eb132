"""Policies about throughput and what it costs [Narayanan 2021, chapter 6].

The printed objective of the least cost, the sum over jobs of throughput over cost, is met by arbitrarily small shares,
since both scale with them. Here time on a kind counts by the steps that it buys per price, as in the authors' program.
Steps of different jobs are compared by the time that they take on the job's fastest kind.
"""

from collections.abc import Hashable

import numpy

from penstock.errors import PlanError
from penstock.fleet.allocations import Allocation, for_problems
from penstock.fleet.jobs import Job, moving_cost
from penstock.fleet.linear_programs import Infeasible, OutOfReach, Program, Solution, Space
from penstock.fleet.problems import Floats, Problem

_SLACK = 1e-8


@for_problems
def max_throughput(problem: Problem) -> Allocation:
    """The sum of all throughputs is as large as it can be, each relative to the job's fastest kind and times its
    workers, so that a job of eight workers counts as eight of one.
    """
    space = Space(problem, [None] * len(problem.jobs))
    objective = space.total_rates(space.workers)
    return space.allocation(Program(space).maximize(objective).shares, "max-throughput")


@for_problems
def min_cost(problem: Problem) -> Allocation:
    """Time goes where it buys the most steps for its price. All jobs run as far as there are workers."""
    space = Space(problem, [_moves(problem, job) for job in problem.jobs])
    return space.allocation(Program(space).maximize(_steps_per_price(space)).shares, "min-cost")


@for_problems
def min_cost_with_deadlines(problem: Problem) -> Allocation:
    """As `min_cost`, and each job is fast enough to meet its deadline.

    Raises `OutOfReach` if not all deadlines can be met: it names the jobs that are too late and what they could meet.
    """
    space = _space_of_deadlines(problem)
    program = Program(space)
    program.throughputs_at_least(_required(space))
    try:
        solution = program.maximize(_steps_per_price(space))
    except Infeasible:
        late = _late_jobs(space, _nearest(space))
        raise OutOfReach(late, lambda: min_cost_near_deadlines(problem)) from None
    return space.allocation(solution.shares, "min-cost-with-deadlines")


@for_problems
def min_cost_near_deadlines(problem: Problem) -> Allocation:
    """As `min_cost_with_deadlines`, but deadlines that cannot all be met are missed by the least sum of throughputs."""
    space = _space_of_deadlines(problem)
    nearest = _nearest(space)
    program = Program(space)
    program.throughputs_at_least(numpy.minimum(_required(space), nearest.rates) * (1 - _SLACK))
    try:
        shares = program.maximize(_steps_per_price(space)).shares
    except Infeasible:
        shares = nearest.shares
    return space.allocation(shares, "min-cost-near-deadlines")


def _space_of_deadlines(problem: Problem) -> Space:
    return Space(problem, [(job.steps, job.deadline_seconds, _moves(problem, job)) for job in problem.jobs])


def _moves(problem: Problem, job: Job) -> Hashable:
    """What moving distinguishes a job by: nothing if it never costs anything."""
    costs = tuple(moving_cost(job.gigabytes, job.region, kind, problem.kinds) for kind in problem.kinds)
    return (job.steps, costs) if any(costs) else None


def _required(space: Space) -> Floats:
    """The normalized throughput of each class that its deadline requires: 0 without a deadline."""
    jobs = [space.problem.jobs[m] for m in space.first]
    rates = [0.0 if job.deadline_seconds is None else job.steps / job.deadline_seconds for job in jobs]
    return numpy.array(rates) / space.fastest


def _steps_per_price(space: Space) -> Floats:
    """The objective of the least cost: normalized steps per price, for each variable. All steps that are left pay for
    a move, so that a job moves when what it saves to its end is more.
    """
    for kind in space.problem.kinds:
        if kind.price_per_hour == 0:
            raise PlanError(
                f"kind {kind.name!r}: price_per_hour: expected a price above 0, found 0: a policy about cost needs the "
                "prices of all kinds"
            )
    highest = max(kind.price_per_hour for kind in space.problem.kinds)
    return space.total_rates(space.workers) / ((space.hourly_prices() * space.sizes + _hourly_moves(space)) / highest)


def _hourly_moves(space: Space) -> Floats:
    """What an hour of each variable pays of its job's move, if the job makes all steps that are left there."""
    problem, hourly = space.problem, numpy.zeros(space.variables)
    for column, (row, j) in enumerate(zip(space.row.tolist(), space.kind.tolist(), strict=True)):
        if row < space.classes:
            m = int(space.first[row])
            job = problem.jobs[m]
            cost = moving_cost(job.gigabytes, job.region, problem.kinds[j], problem.kinds)
            hourly[column] = cost * problem.throughputs[m][j] * 3600 / job.steps
    return hourly


def _nearest(space: Space) -> Solution:
    """The allocation in which the sum of what all jobs lack of the throughputs for their deadlines is least. The extra
    variables are what each class lacks.
    """
    program = Program(space, extra=space.classes)
    rows, columns, values = space.rates
    lacks = numpy.arange(space.classes)
    left = (
        numpy.concatenate([rows, lacks]),
        numpy.concatenate([columns, space.variables + lacks]),
        numpy.concatenate([-values, -numpy.ones(space.classes)]),
    )
    program.at_most(left, -_required(space))
    return program.maximize(numpy.concatenate([numpy.zeros(space.variables), -space.counts]))


def _late_jobs(space: Space, nearest: Solution) -> str:
    """The message about deadlines that cannot be met together."""
    late = []
    for job, number in zip(space.problem.jobs, space.class_of, strict=True):
        if job.deadline_seconds is not None and nearest.extra[number] > 1e-6:
            speed = nearest.rates[number] * space.fastest[number]
            seconds = job.steps / speed if nearest.rates[number] > 1e-9 else numpy.inf
            late.append(f"job {job.name!r} in {seconds:.6g} s, where its deadline is in {job.deadline_seconds:.6g} s")
    return (
        f"deadlines: expected that all can be met, found that the nearest allocation finishes {'; '.join(late)}: give "
        "these jobs more time, drop other jobs, or add workers"
    )
