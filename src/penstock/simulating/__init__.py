"""Simulating: predicts the timeline of a schedule from measured layers and links."""

from penstock.simulating.action_costs import Costs, plan_costs
from penstock.simulating.assumptions import Assumptions, Options
from penstock.simulating.critical_paths import critical_path
from penstock.simulating.lost_time import Losses, find_losses
from penstock.simulating.outcomes import Outcome, evaluate
from penstock.simulating.simulator import default_minibatches, execute, simulate

__all__ = [
    "Assumptions",
    "Costs",
    "Losses",
    "Options",
    "Outcome",
    "critical_path",
    "default_minibatches",
    "evaluate",
    "execute",
    "find_losses",
    "plan_costs",
    "simulate",
]
