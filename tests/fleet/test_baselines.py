"""AlloX beside all orders of few jobs, and Gandiva's pairs."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import numpy
import pytest
from hypothesis import HealthCheck, given, settings

from fleets.baselines import gandiva
from penstock import PlanError
from penstock.fleet import Arrival, Job, Kind, Pair, Problem, allox, simulate_fleet
from penstock.fleet.policies.queues import allox_queues
from support.fleet_problems import fleet_problems

few = settings(derandomize=True, max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def completion_sums(problem: Problem) -> Iterator[float]:
    """The sum of all completion times, for every order of the jobs and every choice of their workers."""
    workers = [j for j, kind in enumerate(problem.kinds) for _ in range(min(kind.workers, len(problem.jobs)))]
    seconds = [
        [job.steps / speed if speed else numpy.inf for speed in row]
        for job, row in zip(problem.jobs, problem.throughputs, strict=True)
    ]
    for order in permutations(range(len(problem.jobs))):
        for chosen in product(range(len(workers)), repeat=len(order)):
            clocks, total = [0.0] * len(workers), 0.0
            for m, worker in zip(order, chosen, strict=True):
                clocks[worker] += seconds[m][workers[worker]]
                total += clocks[worker]
            yield total


@few
@given(fleet_problems(most_jobs=4, most_kinds=2, most_workers=1))
def test_allox_has_the_least_mean_completion_time_of_all_orders(problem):
    kinds = tuple(replace(kind, workers=min(kind.workers, 2)) for kind in problem.kinds)
    problem = replace(problem, kinds=kinds)
    best, total = min(completion_sums(problem)), 0.0
    queues = allox_queues(problem)
    for queue in queues:
        clock = 0.0
        for m, j in queue:
            clock += problem.jobs[m].steps / problem.throughputs[m][j]
            total += clock
    workload = [Arrival(0.0, job, row) for job, row in zip(problem.jobs, problem.throughputs, strict=True)]
    run = simulate_fleet(workload, problem.kinds, allox, ideal=True)

    assert sorted(m for queue in queues for m, _ in queue) == list(range(len(problem.jobs)))
    assert total == pytest.approx(best)
    # A job that has begun may move to a worker that becomes free, which no order without preemption does.
    assert run.mean_seconds * len(problem.jobs) <= best * (1 + 1e-9)
    assert {tuple(front) for front in numpy.argwhere(allox(problem).array())} == {queue[0] for queue in queues}


def test_allox_serves_short_jobs_first():
    """On one device by length. On two, the shortest job delays one of the others: the later one."""
    jobs = tuple(Job(f"job {m}", steps) for m, steps in enumerate((30, 10, 20)))
    one = Problem(jobs, (Kind("GPU", 1),), ((1.0,),) * 3)
    two = replace(one, kinds=(Kind("GPU", 2),))

    assert allox_queues(one) == (((1, 0), (2, 0), (0, 0)),)
    assert allox_queues(two) == (((1, 0), (2, 0)), ((0, 0),))


def test_allox_knows_kinds_and_pools():
    """The fast kind is ten times as fast for one job only; two kinds of a pool have the same device."""
    kinds = (Kind("fast", 1), Kind("slow", 1))
    problem = Problem((Job("a", 100), Job("b", 100)), kinds, ((10, 1), (2, 1.9)))
    shared = Problem((Job("a", 100), Job("b", 50)), (Kind("x", 1, pool="p"), Kind("y", 1, pool="p")), ((1, 2), (2, 1)))

    assert allox(problem).array().tolist() == [[1, 0], [0, 1]]
    assert allox_queues(shared) == (((1, 0), (0, 1)),)
    with pytest.raises(PlanError, match="job 'gang': workers: expected 1 under AlloX, found 2"):
        allox(Problem((Job("gang", 1, workers=2),), (Kind("GPU", 2),), ((1,),)))


def test_gandiva_packs_pairs_that_gain_while_workers_lack():
    """Four jobs on two devices. Of the six pairs two do not fit together, and two pairs are enough."""
    jobs = tuple(Job(name, 100) for name in "abcd")
    speeds = {
        pair: 0.4 if pair in ((0, 1), (2, 3)) else 0.8 for pair in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
    }
    pairs = tuple(Pair(members, ((speed,), (speed,))) for members, speed in speeds.items())
    crowded = Problem(jobs, (Kind("GPU", 2),), ((1.0,),) * 4, pairs)
    found = gandiva(crowded)
    chosen = [pairs[row - 4].jobs for row in numpy.flatnonzero(found.array())]

    assert found.throughputs() == pytest.approx([0.8] * 4)
    assert sorted(m for members in chosen for m in members) == [0, 1, 2, 3]
    assert {(0, 1), (2, 3)}.isdisjoint(chosen)
    # With three devices one pair is enough, and with four none is needed.
    assert sorted(gandiva(replace(crowded, kinds=(Kind("GPU", 3),))).throughputs()) == pytest.approx([0.8, 0.8, 1, 1])
    assert gandiva(replace(crowded, kinds=(Kind("GPU", 4),))).throughputs() == pytest.approx([1] * 4)
    # Pairs that lose take turns instead.
    losing = replace(crowded, pairs=tuple(replace(pair, throughputs=((0.4,), (0.4,))) for pair in pairs))
    assert gandiva(losing).throughputs() == pytest.approx([0.5] * 4)


def test_gandiva_keeps_a_pair_when_another_job_ends():
    names = [f"job {m}" for m in range(8)]

    def partners(present: list[str]) -> set[tuple[str, ...]]:
        jobs = tuple(Job(name, 100) for name in present)
        numbers = [(a, b) for b in range(len(jobs)) for a in range(b)]
        pairs = tuple(Pair(members, ((0.8, 0.0), (0.8, 0.0))) for members in numbers)
        problem = Problem(jobs, (Kind("A", 2), Kind("B", 1)), ((1.0, 0.5),) * len(jobs), pairs)
        rows = numpy.flatnonzero(gandiva(problem).array().sum(axis=1))
        return {tuple(present[m] for m in problem.combinations[row]) for row in rows}

    before = partners(names)
    ended = next(iter(found for found in before if len(found) == 2))

    assert {len(found) for found in before} == {2}
    assert partners([name for name in names if name not in ended]) == before - {ended}
