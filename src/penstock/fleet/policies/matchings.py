"""AlloX: jobs of one worker in queues, so that their mean completion time is least [Narayanan 2021, section 5.7.3].

A job that is k-th from the end of a worker's queue delays k jobs, itself included, by its time on this worker. The sum
of all completion times is therefore that of a matching of jobs to places in queues, counted from their ends.
"""

import numpy

from penstock.errors import PlanError
from penstock.fleet.allocations import Allocation
from penstock.fleet.linear_programs import scipy_module
from penstock.fleet.problems import Problem


def allox(problem: Problem) -> Allocation:
    """The mean completion time is as small as it can be without preemption, if no other jobs come. The first job of
    each queue has its worker all of the time, and the others wait.

    Jobs that have begun may wait or move when the policy is asked again. Weights and pairs do not count. Raises
    `PlanError` for a job of several workers, which has no place in the queue of one.
    """
    shares = numpy.zeros((len(problem.combinations), len(problem.kinds)))
    for queue in allox_queues(problem):
        shares[queue[0]] = 1.0
    return Allocation(problem, tuple(map(tuple, shares.tolist())), "allox")


def allox_queues(problem: Problem) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The queue of every worker that has jobs: the numbers of the job and of its kind, in the order in which they run.

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
