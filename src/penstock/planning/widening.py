"""Widening: one straight pipeline becomes d equal parallel ones.

Consecutive ranks hold the replicas of one stage, so that an all-reduce stays inside a server if possible [Narayanan
2021, section 3.3]. The stages of one pipeline are d ranks apart.
"""

from penstock.planning.predictions import foresee
from penstock.planning.requests import Request
from penstock.planning.stage_costs import chain_costs
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import Profile


def widen(narrow: Plan, replicas: int, profile: Profile, cluster: Cluster, request: Request) -> Plan:
    """The plan `narrow`, which has no replicas, with `replicas` of every stage and the microbatches of `request`."""
    stages = tuple(
        Stage(stage.start, stage.stop, tuple(range(first * replicas, (first + 1) * replicas)))
        for stage in narrow.stages
        for (first,) in [stage.ranks]
    )
    costs = chain_costs(profile, cluster, recompute=request.recompute)
    return foresee(stages, profile, costs, cluster, request)
