"""The baselines that cannot tell kinds apart: what a scheduler does that counts devices only; and Gandiva's sharing of
space, which gives pairs of jobs equal time [Narayanan 2021, section 5.7.3].
"""

from collections.abc import Callable
from dataclasses import replace
from zlib import crc32

import numpy

from penstock.fleet.allocations import Allocation, for_problems
from penstock.fleet.jobs import Job
from penstock.fleet.policies.fairness import max_min_fairness
from penstock.fleet.problems import Floats, Problem

_NEAR = 1e-6
_ROUNDS = 200
"""Spreading ends where no kind is overfull by more than the first share, or after the second number of rounds."""


@for_problems
def isolated_shares(problem: Problem) -> Allocation:
    """Every job has 1/n of every kind: a static partition, with which sharing is compared."""
    rows = numpy.concatenate([problem.isolated_shares(), numpy.zeros((len(problem.pairs), len(problem.kinds)))])
    return Allocation(problem, tuple(map(tuple, rows.tolist())), "isolated-shares")


def blind(policy: Callable[[Problem], Allocation]) -> Callable[[Problem], Allocation]:
    """`policy` as if all kinds were equally fast: each job runs everywhere at its mean throughput over all workers.

    The policy decides for how much of the time a job runs. This time is spread over the kinds by their workers, since
    nothing distinguishes them. Pairs are left out.
    """

    @for_problems
    def decide(problem: Problem) -> Allocation:
        speeds = problem.speeds()
        there = speeds > 0
        mean = (speeds @ problem.equal_shares()) / (there @ problem.equal_shares())
        alike = replace(problem, throughputs=tuple(map(tuple, (there * mean[:, None]).tolist())), pairs=())
        found = policy(alike)
        rows = _spread(alike, found)
        full = numpy.concatenate([rows, numpy.zeros((len(problem.pairs), len(problem.kinds)))])
        return Allocation(problem, tuple(map(tuple, full.tolist())), f"blind-{found.policy}")

    return decide


def _spread(problem: Problem, found: Allocation) -> Floats:
    """The time of each job, over its kinds by their workers. Where some jobs cannot run everywhere, the others have
    less of the kinds that would be overfull, and more of the rest.
    """
    rows: Floats = (problem.speeds() > 0) * problem.equal_shares()
    busy, sizes = found.busy()[:, None], problem.workers()[:, None]
    for _ in range(_ROUNDS):
        # A job without time has no sum to divide by.
        rows *= busy / numpy.maximum(rows.sum(axis=1, keepdims=True), 1e-300)
        taken, worst = (rows * sizes).sum(axis=0), 1.0
        for name, workers in problem.pools.items():
            columns = [j for j, kind in enumerate(problem.kinds) if kind.devices == name]
            over = float(taken[columns].sum()) / workers
            if over > 1:
                worst = max(worst, over)
                rows[:, columns] /= over
        if worst < 1 + _NEAR:
            break
    return rows


@for_problems
def gandiva(problem: Problem) -> Allocation:
    """Jobs form random pairs while they want more workers than there are. A pair stays together if it gets more done
    than both in turns. Pairs and single jobs then have equal time, whatever the kinds.

    The order of trials follows from the names of jobs, so a pair seldom changes when other jobs come or go. Trials take
    no time here. Weights do not count.
    """
    packed = _packed(problem)
    taken = {m for index in packed for m in problem.pairs[index].jobs}
    rows = [m for m in range(len(problem.jobs)) if m not in taken] + [len(problem.jobs) + index for index in packed]
    runs = numpy.concatenate(
        [problem.speeds(), numpy.array([pair.throughputs[0] for pair in problem.pairs]).reshape(-1, len(problem.kinds))]
    )
    units = Problem(
        jobs=tuple(Job(str(row), 1.0, workers=problem.jobs[problem.combinations[row][0]].workers) for row in rows),
        kinds=problem.kinds,
        throughputs=tuple(map(tuple, (runs[rows] > 0).astype(float).tolist())),
    )
    shares = numpy.zeros_like(runs)
    shares[rows] = blind(max_min_fairness)(units).array()
    return Allocation(problem, tuple(map(tuple, shares.tolist())), "gandiva")


def _packed(problem: Problem) -> list[int]:
    """The numbers of the pairs that stay together."""
    excess = problem.workers().sum() - sum(problem.pools.values())
    names = [job.name for job in problem.jobs]
    order = sorted(
        range(len(problem.pairs)),
        key=lambda index: crc32("\n".join(names[m] for m in problem.pairs[index].jobs).encode()),
    )
    speeds, equal = problem.speeds(), problem.equal_shares()
    packed: list[int] = []
    taken: set[int] = set()
    for index in order:
        if excess <= 0:
            break
        pair = problem.pairs[index]
        if taken.isdisjoint(pair.jobs) and _gain(pair.throughputs, speeds[list(pair.jobs)], equal) > 1:
            packed.append(index)
            taken.update(pair.jobs)
            excess -= problem.jobs[pair.jobs[0]].workers
    return packed


def _gain(together: tuple[tuple[float, ...], ...], alone: Floats, equal: Floats) -> float:
    """The throughputs of both jobs of a pair, each relative to that alone, for an equal time on each worker that can
    run them together. Two jobs that take turns have 1.
    """
    both = numpy.array(together)
    (runs,) = numpy.nonzero((both > 0).all(axis=0) & (alone > 0).all(axis=0))
    if not len(runs):
        return 0.0
    return float((both[:, runs] / alone[:, runs]).sum(axis=0) @ equal[runs] / equal[runs].sum())
