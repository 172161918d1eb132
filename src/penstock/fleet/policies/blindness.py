"""The baselines that cannot tell kinds apart: what a scheduler does that counts devices only."""

from collections.abc import Callable
from dataclasses import replace

import numpy

from penstock.fleet.allocations import Allocation
from penstock.fleet.problems import Floats, Problem

_NEAR = 1e-6
_ROUNDS = 200
"""Spreading ends where no kind is overfull by more than the first share, or after the second number of rounds."""


def isolated_shares(problem: Problem) -> Allocation:
    """Every job has 1/n of every kind: a static partition, with which sharing is compared."""
    rows = numpy.concatenate([problem.isolated_shares(), numpy.zeros((len(problem.pairs), len(problem.kinds)))])
    return Allocation(problem, tuple(map(tuple, rows.tolist())), "isolated-shares")


def blind(policy: Callable[[Problem], Allocation]) -> Callable[[Problem], Allocation]:
    """`policy` as if all kinds were equally fast: each job runs everywhere at its mean throughput over all workers.

    The policy decides for how much of the time a job runs. This time is spread over the kinds by their workers, since
    nothing distinguishes them. Pairs are left out.
    """

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
