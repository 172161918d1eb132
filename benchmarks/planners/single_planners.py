"""The planners of PipeDream and SPP alone, without the search around them; they raise if nothing fits."""

from typing import Any

from penstock.errors import PlanError
from penstock.planning.pipedream.partitions import find_pipedream
from penstock.planning.requests import Request
from penstock.planning.spp.spp_search import find_spp
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile

__all__ = ["partition", "plan_pipedream", "plan_spp"]


def partition(profile: Profile, cluster: Cluster, **options: Any) -> Plan:
    """PipeDream's plan for a request with `options`."""
    return plan_pipedream(profile, cluster, Request("pipedream", **options))


def plan_pipedream(profile: Profile, cluster: Cluster, request: Request) -> Plan:
    """The plan whose slowest stage or link is fastest. `PlanError` if nothing fits in memory."""
    return _require(find_pipedream(profile, cluster, request), "pipedream")


def plan_spp(profile: Profile, cluster: Cluster, request: Request, *, whole_samples: bool = False) -> Plan:
    """The plan under `spp` whose simulated minibatch is the fastest. `PlanError` if nothing fits in memory."""
    return _require(find_spp(profile, cluster, request, whole_samples=whole_samples), "spp")


def _require(found: Plan | None, planner: str) -> Plan:
    if found is None:
        raise PlanError(f"planner {planner}: expected a plan that fits in memory, found none: use more memory")
    return found
