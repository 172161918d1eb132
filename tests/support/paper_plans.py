"""The plans of single planners, without the search around them."""

from typing import Any

from penstock.planning.pipedream.partitions import find_pipedream
from penstock.planning.requests import Request
from penstock.values import Cluster, Plan, Profile


def partition(profile: Profile, cluster: Cluster, *, schedule: str = "pipedream", **options: Any) -> Plan:
    """The plan of PipeDream's partitioner for a request with `options`."""
    plan = find_pipedream(profile, cluster, Request(schedule, **options))
    assert plan is not None
    return plan
