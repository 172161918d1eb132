"""SPP on machines of many devices: groups of neighboring devices count as one.

The time of the dynamic program grows with the fourth power of the devices. So a machine of many is planned as one of
few, each of which stands for a group of g devices in a row, and every stage then has g times as many replicas. Groups
do not change what is best exactly: a stage computes g times as fast, a message between two groups has g^2 links, and an
all-reduce takes about as long as before. So the small machine is planned twice, with links as they are and with links
that are g times as fast, and the search compares what comes out.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from penstock.errors import PlanError
from penstock.planning.predictions import foresee
from penstock.planning.requests import Request
from penstock.planning.spp.spp_search import spp_candidates
from penstock.planning.stage_costs import chain_costs
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile

MOST_ORDERED = 32
"""With more devices, groups of them are planned, unless the planner is named."""

_KEPT = 2
"""How many numbers of stages are proposed for each small machine."""


def propose_grouped(profile: Profile, cluster: Cluster, request: Request) -> Iterator[Plan]:
    """SPP's plans on groups of devices, for the smallest groups that leave few enough of them.

    Raises `PlanError` if there are none.
    """
    size = next((each for each in range(2, cluster.devices + 1) if _divides(each, cluster)), 0)
    found = False
    for faster in (1.0, float(size)) if size else ():
        small = _group(cluster, size, faster)
        try:
            candidates = spp_candidates(profile, small, request, whole_samples=True)
        except PlanError:
            continue
        # A deep pipeline takes longer to fill than its busiest stage says.
        filled = sorted(candidates, key=lambda each: each[0] * (1 + len(each[1].stages) / request.microbatches))
        widened = [_widen(plan, size) for _, plan in filled]
        fitting = [plan for plan in widened if not any(profile.microbatch_size % count for count in plan.replicas)]
        costs = chain_costs(profile, recompute=request.recompute, full_duplex=True)
        for plan in fitting[:_KEPT]:
            found = True
            predicted = foresee(plan.stages, profile, costs, cluster, request).predicted
            yield replace(plan, predicted=predicted)
    if not found:
        raise PlanError(
            f"planner spp: expected groups of {cluster.devices} devices that share {profile.microbatch_size} samples "
            "equally, found none: use microbatches of another size"
        )


def _divides(size: int, cluster: Cluster) -> bool:
    return cluster.devices % size == 0 and cluster.devices // size <= MOST_ORDERED // 2


def _group(cluster: Cluster, size: int, faster: float) -> Cluster:
    """The machine of the first devices of all groups, with links that are `faster`."""
    firsts = range(0, cluster.devices, size)
    speeds = [[cluster.bandwidth(a, b) * faster for b in firsts] for a in firsts]
    latencies = [[cluster.latency(a, b) for b in firsts] for a in firsts]
    small = Cluster.from_matrix(speeds, cluster.memory_bytes, latencies)
    return replace(small, action_seconds=cluster.action_seconds)


def _widen(plan: Plan, size: int) -> Plan:
    stages = tuple(
        replace(stage, ranks=tuple(chain.from_iterable(range(rank * size, (rank + 1) * size) for rank in stage.ranks)))
        for stage in plan.stages
    )
    return replace(plan, stages=stages, predicted=None)
