"""Policies: each is a function from a problem to an allocation, and so is one of your own.

Start reading in ``fairness.py``. ``linear_programs.py`` beside this folder has the constraints that all share.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from penstock.fleet.allocations import Allocation
from penstock.fleet.linear_programs import OutOfReach
from penstock.fleet.policies.completion_times import finish_time_fairness, min_makespan, min_makespan_within_budget
from penstock.fleet.policies.costs import max_throughput, min_cost, min_cost_near_deadlines, min_cost_with_deadlines
from penstock.fleet.policies.fairness import hierarchical, max_min_fairness, water_filling
from penstock.fleet.policies.queues import allox, fifo, shortest_job_first, strict_fifo
from penstock.fleet.problems import Problem

Policy: TypeAlias = Callable[[Problem], Allocation]


def decide(
    policy: Policy, problem: Problem, begun: bool, report: Callable[[str], object] = lambda text: None
) -> Allocation:
    """The allocation of `policy`; in a run that has `begun`, the nearest one where it cannot keep its promise."""
    try:
        return policy(problem)
    except OutOfReach as error:
        if not begun:
            raise
        report(f"{error}. The nearest allocation is taken")
        return error.nearest()


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "max-min-fairness": max_min_fairness,
        "water-filling": water_filling,
        "hierarchical": hierarchical,
        "finish-time-fairness": finish_time_fairness,
        "makespan": min_makespan,
        "makespan-within-budget": min_makespan_within_budget,
        "fifo": fifo,
        "strict-fifo": strict_fifo,
        "shortest-job-first": shortest_job_first,
        "max-throughput": max_throughput,
        "min-cost": min_cost,
        "min-cost-with-deadlines": min_cost_with_deadlines,
        "min-cost-near-deadlines": min_cost_near_deadlines,
        "allox": allox,
    }
)
"""All policies by name."""
