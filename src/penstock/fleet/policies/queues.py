"""Policies that serve jobs one after the other: by arrival (FIFO), the shortest first, or a queue each (AlloX)."""

from collections.abc import Sequence

import numpy

from penstock.errors import PlanError
from penstock.fleet.allocations import Allocation, for_problems
from penstock.fleet.linear_programs import Program, Solution, Space, scipy_module
from penstock.fleet.policies.completion_times import remaining_seconds
from penstock.fleet.problems import Floats, Problem

_SLACK = 1e-8
"""Levels are held up to this much, since the solver found them up to a tolerance."""
_NOTHING = 1e-6
"""Levels that are held with slack leave this much to the jobs behind, which is no share."""


@for_problems
def fifo(problem: Problem) -> Allocation:
    """The sum of the throughputs, each relative to its fastest kind and times a weight that falls with the arrival:
    M - m for job m of 0 to M - 1 [Narayanan 2021, section 5.4.2].

    Linear weights are not a strict order: two late jobs can outweigh an early one. `strict_fifo` is.
    """
    space = Space(problem)
    weights = numpy.arange(len(problem.jobs), 0, -1) / len(problem.jobs)
    return space.allocation(Program(space).maximize(space.total_rates(weights)).shares, "fifo")


@for_problems
def strict_fifo(problem: Problem) -> Allocation:
    """The first job is as fast as it can be, then the second with what is left, and so on."""
    return _in_order(problem, range(len(problem.jobs)), "strict-fifo")


@for_problems
def shortest_job_first(problem: Problem) -> Allocation:
    """The job that can finish first does so as early as possible, then the next with what is left, and so on.

    The objective of [Narayanan 2021, section 5.4.2], the least of all durations, says something about the first of
    these jobs only.
    """
    seconds = remaining_seconds(Space(problem))
    return _in_order(problem, sorted(range(len(problem.jobs)), key=lambda m: seconds[m]), "shortest-job-first")


def _in_order(problem: Problem, order: Sequence[int], policy: str) -> Allocation:
    """The lexicographic optimum of the jobs' throughputs in this order."""
    space = Space(problem)
    levels, shares = numpy.zeros(space.classes), numpy.zeros(space.variables)
    for place, m in enumerate(order):
        chosen = numpy.zeros(space.classes)
        chosen[m] = 1.0
        found = _most(space, levels, chosen)
        # A level that is no share would make a row of numbers that no solver can tell from 0.
        shares, levels[m] = found.shares, found.rates[m] if found.rates[m] > _NOTHING else 0.0
        if levels[m] < 1 - _SLACK:
            # Once the jobs behind can have nothing, even all together, the rest of the order does not matter.
            rest = numpy.zeros(space.classes)
            rest[list(order[place + 1 :])] = 1.0
            if _most(space, levels, rest).value < _NOTHING:
                break
    return space.allocation(shares, policy, _NOTHING)


def _most(space: Space, levels: Floats, weights: Floats) -> Solution:
    """The largest weighted sum of throughputs while each job has at least its level."""
    program = Program(space)
    program.throughputs_at_least(levels * (1 - _SLACK))
    return program.maximize(space.total_rates(weights))


@for_problems
def allox(problem: Problem) -> Allocation:
    """The mean completion time is as small as it can be without preemption, if no other jobs come [Narayanan 2021,
    section 5.7.3]. The first job of each queue has its worker all of the time, and the others wait.

    Jobs that have begun may wait or move when the policy is asked again. Weights and pairs do not count. Raises
    `PlanError` for a job of several workers, which has no place in the queue of one.
    """
    shares = numpy.zeros((len(problem.combinations), len(problem.kinds)))
    for queue in allox_queues(problem):
        shares[queue[0]] = 1.0
    return Allocation(problem, tuple(map(tuple, shares.tolist())), "allox")


def allox_queues(problem: Problem) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The queue of every worker that has jobs: the numbers of the job and of its kind, in the order in which they run.

    A job that is k-th from the end of a queue delays k jobs, itself included, by its time on this worker. So the sum
    of all completion times is that of a matching of jobs to places in queues, counted from their ends.

    Of the jobs that are equally far from the ends of their queues, the earlier ones have the shorter queues.
    """
    for job in problem.jobs:
        if job.workers > 1:
            raise PlanError(
                f"job {job.name!r}: workers: expected 1 under AlloX, found {job.workers}: AlloX matches jobs with "
                "single workers; take another policy"
            )
    speeds, steps = problem.speeds(), numpy.array([job.steps for job in problem.jobs])
    seconds, fastest, pool_of, places = [], [], [], []
    for pool, (name, workers) in enumerate(problem.pools.items()):
        columns = numpy.array([j for j, kind in enumerate(problem.kinds) if kind.devices == name])
        fastest.append(columns[speeds[:, columns].argmax(axis=1)])
        with numpy.errstate(divide="ignore"):
            seconds.append(steps / speeds[:, columns].max(axis=1))
        # Workers of a pool are alike, so none has two jobs more than another.
        deepest = -(-len(steps) // workers)
        pool_of += [pool] * (workers * deepest)
        places += [1 + place // workers for place in range(workers * deepest)]
    costs = numpy.array(seconds).T[:, pool_of] * numpy.array(places)
    _, columns = scipy_module("optimize").linear_sum_assignment(costs)
    members: dict[tuple[int, int], list[int]] = {}
    for m, column in enumerate(columns.tolist()):
        members.setdefault((pool_of[column], places[column]), []).append(m)
    queues: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (pool, _), jobs in sorted(members.items()):
        # The queues with the first numbers are the longest ones.
        for number, m in enumerate(reversed(jobs)):
            queues.setdefault((pool, number), []).insert(0, (m, int(fastest[pool][m])))
    return tuple(tuple(queue) for queue in queues.values())
