"""The plans of single planners, without the search around them, and a profile that many plans are made for."""

from typing import Any

from penstock.planning.pipedream.partitions import find_pipedream
from penstock.planning.requests import Request
from penstock.values import Cluster, LayerProfile, Plan, Profile

GB = 1e9


def partition(profile: Profile, cluster: Cluster, *, schedule: str = "pipedream", **options: Any) -> Plan:
    """The plan of PipeDream's partitioner for a request with `options`."""
    plan = find_pipedream(profile, cluster, Request(schedule, **options))
    assert plan is not None
    return plan


def language_model(blocks: int = 16, head: float = 0.6) -> Profile:
    """Equal blocks and a head with large logits, which takes this share of a block's seconds."""
    layers = [LayerProfile(f"block{index}", 1e-2, 2e-2, 16e6, 0.4 * GB, 1e8) for index in range(blocks)]
    return Profile((*layers, LayerProfile("head", head * 1e-2, head * 2e-2, 0, 1.0 * GB, 4e8)), 1)
