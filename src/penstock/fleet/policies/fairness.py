"""Max-min fairness over normalized throughputs [Narayanan 2021, section 5.4.1], and water filling [section 5.4.3].

The share of a job is its throughput over that of an equal time on each worker, times its workers, since a job of eight
workers is owed eight times as much.
"""

from collections.abc import Callable, Sequence

import numpy

from penstock.errors import PlanError
from penstock.fleet.allocations import Allocation, for_problems
from penstock.fleet.linear_programs import Program, Space, fill
from penstock.fleet.problems import Floats, Problem

_FROZEN = 1e-7
"""A class whose throughput holds the optimum back by more than this is limited."""


def _fair_share_units(space: Space) -> Floats:
    """The normalized throughput of the space that is a share of 1, for each class."""
    problem = space.problem
    equal = (problem.speeds() @ problem.equal_shares())[space.first]
    units: Floats = equal / space.fastest / problem.workers()[space.first]
    return units


@for_problems
def max_min_fairness(problem: Problem) -> Allocation:
    """The least weighted share is as large as it can be (LAS with weights).

    What is free after that goes where it makes the sum of the shares largest, and takes nothing from the least.
    """
    space = Space(problem, [job.weight for job in problem.jobs])
    owed = _fair_share_units(space) * space.of_jobs([job.weight for job in problem.jobs])
    program = Program(space, extra=1)
    program.throughputs_at_least(numpy.zeros(space.classes), extra=owed)
    solution = program.maximize(numpy.append(numpy.zeros(space.variables), 1.0))
    shares = fill(space, solution, at_least=owed * solution.value, weights=1 / _fair_share_units(space))
    return space.allocation(shares, "max-min-fairness")


@for_problems
def water_filling(problem: Problem) -> Allocation:
    """Max-min fairness, then again among the jobs that could still have more, until no job can.

    No job can have more unless another one with at most its share gets less.
    """
    weights = [job.weight for job in problem.jobs]

    def weights_of(running: set[int]) -> list[float]:
        # A limited job's weight is lost.
        return [weight if m in running else 0.0 for m, weight in enumerate(weights)]

    return _fill_with_water(problem, weights, weights_of, "water-filling")


@for_problems
def hierarchical(problem: Problem) -> Allocation:
    """Water filling for entities by their weights, and inside each for its jobs: by their weights, or in the order of
    their arrival.
    """
    jobs, entities = problem.jobs, problem.entities
    if not entities:
        raise PlanError("Problem: entities: expected one or more for a hierarchical policy, found none: give them")
    members = {each.name: [m for m, job in enumerate(jobs) if job.entity == each.name] for each in entities}
    in_order = {entity.name for entity in entities if entity.first_come}

    def weights_of(running: set[int]) -> list[float]:
        # A limited job's weight goes to the others of its entity.
        weights = [0.0] * len(jobs)
        for entity in entities:
            left = [m for m in members[entity.name] if m in running]
            if entity.first_come:
                left = left[:1]
            total = sum(jobs[m].weight for m in left)
            for m in left:
                weights[m] = entity.weight * jobs[m].weight / total
        return weights

    # Jobs that take turns differ by their place in the queue.
    keys = [(job.entity, m if job.entity in in_order else None, job.weight) for m, job in enumerate(jobs)]
    return _fill_with_water(problem, keys, weights_of, "hierarchical")


def _fill_with_water(
    problem: Problem, keys: Sequence[object], weights_of: Callable[[set[int]], list[float]], policy: str
) -> Allocation:
    """Raises the level of all jobs by their weights until some are limited, and goes on with the others. `weights_of`:
    the weight of each job while some of them can have more.

    A job is limited if the optimum of the level depends on its throughput: its dual is not 0. Then no allocation gives
    it more while the others keep theirs, so no search for such jobs is needed, unlike [Narayanan 2021, section 5.4.3],
    and each round finds one or more. A limited job whose dual is 0 is found in a later round, which raises nothing.
    """
    space = Space(problem, keys)
    units = _fair_share_units(space)
    levels = numpy.zeros(space.classes)
    running = set(range(len(problem.jobs)))
    while True:
        owed = space.of_jobs(weights_of(running))
        program = Program(space, extra=1)
        program.throughputs_at_least(levels * units, extra=owed * units)
        solution = program.maximize(numpy.append(numpy.zeros(space.variables), 1.0))
        levels = numpy.minimum(levels + owed * solution.value, solution.rates / units)
        limited = (solution.held * owed * units > _FROZEN) & (owed > 0)
        if not limited.any():
            limited = owed > 0
        running = {m for m in running if not limited[space.class_of[m]]}
        if not running:
            return space.allocation(solution.shares, policy)
