"""Simulating: the timeline of a schedule, predicted from measured layers and links."""

from penstock.simulating.assumptions import Assumptions, Options
from penstock.simulating.costs import Costs, plan_costs
from penstock.simulating.simulator import execute, simulate, telling_minibatches

__all__ = ["Assumptions", "Costs", "Options", "execute", "plan_costs", "simulate", "telling_minibatches"]
