"""Planners: from a profile and a cluster to a plan.

Each planner has a package of its own; the modules here are shared, and `search` runs all planners.
"""

from penstock.planning.cluster_comparisons import compare_clusters
from penstock.planning.orders.order_plans import Frontier, FrontierPoint, frontier
from penstock.planning.orders.search import FoundOrder, find_order, limit_order
from penstock.planning.planners import plan
from penstock.planning.ptd_p import plan_three_d
from penstock.planning.search.constraints import PlanConstraints
from penstock.planning.search.tensor_groups import compare_plans

__all__ = [
    "FoundOrder",
    "Frontier",
    "FrontierPoint",
    "PlanConstraints",
    "compare_clusters",
    "compare_plans",
    "find_order",
    "frontier",
    "limit_order",
    "plan",
    "plan_three_d",
]
