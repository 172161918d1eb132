"""Policies about the time at which jobs finish [Narayanan 2021, section 5.4.2]."""

from dataclasses import replace

import numpy

from penstock.errors import PlanError
from penstock.fleet.allocations import Allocation, for_problems
from penstock.fleet.linear_programs import Infeasible, OutOfReach, Program, Solution, Space, fill
from penstock.fleet.problems import Floats, Problem

_PRECISE = 1e-6
"""A search for a level ends where its bounds are this close, relative to the level."""
_GUESSES = 60
"""Searches that would take more steps than this end where they are: the last allocation is valid."""


def remaining_seconds(space: Space) -> Floats:
    """The time that a job of each class needs on its fastest kind."""
    return space.of_jobs([job.steps for job in space.problem.jobs]) / space.fastest


@for_problems
def min_makespan(problem: Problem) -> Allocation:
    """The last job finishes as early as it can. What is free after that makes the other jobs faster."""
    space = Space(problem, [job.steps for job in problem.jobs])
    needed = remaining_seconds(space)
    solution = _most_of(space, needed)
    return space.allocation(fill(space, solution, at_least=needed * solution.value), "makespan")


@for_problems
def finish_time_fairness(problem: Problem) -> Allocation:
    """The greatest rho is as small as it can be: the time that a job takes from its arrival to its end, over that on
    1/n of the fleet (Themis). Then the free workers make jobs faster.
    """
    space = Space(problem, [(job.steps, job.elapsed_seconds, job.isolated_seconds) for job in problem.jobs])
    isolated = problem.isolated_speeds()[space.first]
    elapsed = space.of_jobs([job.elapsed_seconds for job in problem.jobs])
    alone = space.of_jobs([job.isolated_seconds for job in problem.jobs])
    alone = alone + space.of_jobs([job.steps for job in problem.jobs]) / isolated
    needed = remaining_seconds(space)

    def ratios(solution: Solution) -> Floats:
        with numpy.errstate(divide="ignore"):
            return numpy.asarray((elapsed + needed / solution.rates) / alone)

    # The fastest kind all of the time is a lower bound for each job; every allocation gives an upper one. The duals of
    # a program price throughputs: no allocation is worth more than its optimum. A ratio whose throughputs are worth
    # more cannot be met, and the least that can is the next guess. Each guess finds other duals, so there are few.
    low = float(((elapsed + needed) / alone).max())
    best = _most_of(space, needed / alone)
    high, guess = float(ratios(best).max()), low
    for _ in range(_GUESSES):
        if high - low <= _PRECISE * high:
            break
        found = _most_of(space, needed / (guess * alone - elapsed))
        reached = float(ratios(found).max())
        if reached < high:
            best, high = found, reached
        if found.value < 1:
            low = max(guess, _affordable(guess, found, needed, alone, elapsed))
        # Where rounding hides the next step, half-way is one.
        guess = low if low > guess else (low + high) / 2
    return space.allocation(fill(space, best, at_least=needed / (high * alone - elapsed)), "finish-time-fairness")


def _affordable(low: float, found: Solution, needed: Floats, alone: Floats, elapsed: Floats) -> float:
    """The least ratio, `low` or more, whose throughputs are worth no more than the optimum `found` at the prices of its
    duals. Newton's steps come from below, since what throughputs are worth is convex in the ratio.
    """
    # A class that the duals price at 0 would only make a ratio of 0 over 0.
    (priced,) = numpy.nonzero(found.held > 0)
    worth, alone, elapsed = (found.held * needed)[priced], alone[priced], elapsed[priced]
    limit = float(found.held @ found.rates)
    for _ in range(_GUESSES):
        left = low * alone - elapsed
        excess, slope = float((worth / left).sum()) - limit, float((worth * alone / left**2).sum())
        if excess <= _PRECISE / 10 * limit:
            break
        low += excess / slope
    return low


@for_problems
def min_makespan_within_budget(problem: Problem) -> Allocation:
    """The last job finishes as early as it can if all jobs together cost at most `Problem.budget` until they are done
    [Narayanan 2021, section 6.4.3].

    The durations on each kind are the variables: in them the makespan is linear, and no search for it is needed.
    """
    if problem.budget is None:
        raise PlanError("Problem: budget: expected the most that the jobs may cost, found nothing: give one")
    space = Space(problem, [job.steps for job in problem.jobs])
    needed = remaining_seconds(space)
    # Durations are in units of this one, since the solver's tolerances are absolute.
    unit = float(needed.max())
    program = Program(space, extra=1)
    program.longer_time(0)
    program.throughputs_at_least(needed / unit)
    prices = space.hourly_prices() * space.taken
    every = numpy.arange(space.variables)
    scale = max(float(prices.max()), 1e-300)
    program.at_most(
        (numpy.zeros_like(every), every, prices / scale), numpy.array([problem.budget / (unit / 3600) / scale])
    )
    try:
        solution = program.maximize(numpy.append(numpy.zeros(space.variables), -1.0))
    except Infeasible:
        least = _least_cost(space)
        raise OutOfReach(
            f"budget: expected at least {least:.6g}, what the jobs cost if each is on its cheapest kind, found "
            f"{problem.budget:.6g}: raise it, or drop jobs",
            lambda: min_makespan_within_budget(replace(problem, budget=least * (1 + _PRECISE))),
        ) from None
    return space.allocation(solution.shares / solution.extra[0], "makespan-within-budget")


def _least_cost(space: Space) -> float:
    """What it costs to finish all jobs, each on the kind where its steps are cheapest."""
    problem = space.problem
    prices = numpy.array([kind.price_per_hour for kind in problem.kinds]) / 3600
    with numpy.errstate(divide="ignore", invalid="ignore"):
        per_step = numpy.where(problem.speeds() > 0, prices / problem.speeds(), numpy.inf).min(axis=1)
    steps = numpy.array([job.steps for job in problem.jobs])
    return float((per_step * steps * problem.workers()).sum())


def _most_of(space: Space, required: Floats) -> Solution:
    """The largest multiple of the throughputs `required` that all jobs can have at once."""
    # Numbers near 1 suit the solver.
    unit = float(required.max())
    program = Program(space, extra=1)
    program.throughputs_at_least(numpy.zeros(space.classes), extra=required / unit)
    found = program.maximize(numpy.append(numpy.zeros(space.variables), 1.0))
    return replace(found, value=found.value / unit)
