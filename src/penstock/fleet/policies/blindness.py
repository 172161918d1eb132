"""The baselines that cannot tell kinds apart: what a scheduler does that counts devices only."""

from collections.abc import Callable
from dataclasses import replace

import numpy

from penstock.fleet.allocations import Allocation
from penstock.fleet.problems import Floats, Problem

__all__ = ["blind", "isolated_shares"]


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
    """The time of each job, over its kinds by their workers; as `found` if that would take more workers than there are,
    which only happens where some jobs cannot run everywhere.
    """
    there = problem.speeds() > 0
    weights = there * problem.equal_shares()
    rows: Floats = found.busy()[:, None] * weights / weights.sum(axis=1, keepdims=True)
    taken = (rows * problem.workers()[:, None]).sum(axis=0)
    for name, workers in problem.pools.items():
        columns = [j for j, kind in enumerate(problem.kinds) if kind.devices == name]
        if taken[columns].sum() > workers * (1 + 1e-9):
            return found.array()
    return rows
