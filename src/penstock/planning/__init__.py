"""Planners: from a profile and a cluster to a plan."""

from penstock.planning.pipedream import noam, partition
from penstock.planning.planners import plan
from penstock.planning.searches import search
from penstock.planning.three_d import plan_three_d
from penstock.planning.wishes import Wishes

__all__ = ["Wishes", "noam", "partition", "plan", "plan_three_d", "search"]
