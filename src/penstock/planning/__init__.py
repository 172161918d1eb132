"""Planners: from a profile and a cluster to a plan."""

from penstock.planning.pipedream import noam, partition
from penstock.planning.planners import PLANNERS, plan

__all__ = ["PLANNERS", "noam", "partition", "plan"]
