"""Simulating: the timeline of a schedule, predicted from measured layers and links."""

from penstock.simulating.assumptions import Assumptions, Options
from penstock.simulating.costs import Costs, plan_costs
from penstock.simulating.critical_paths import critical_path
from penstock.simulating.outcomes import Outcome, evaluate
from penstock.simulating.simulator import execute, simulate, telling_minibatches

__all__ = [
    "Assumptions",
    "Costs",
    "Options",
    "Outcome",
    "critical_path",
    "evaluate",
    "execute",
    "plan_costs",
    "simulate",
    "telling_minibatches",
]
