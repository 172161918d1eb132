"""The rivals of the search: random plans run, and climbing makes a plan no slower."""

import random

import pytest

from penstock.values.clusters import Cluster
from planners.profiles import load_profiles
from planners.rivals import Judge, climb, random_plan

PROFILE = load_profiles(None, ["gnmt"])["gnmt"]
CLUSTERS = {
    "slow links": Cluster.uniform(4, 1.25e8),
    "servers": Cluster.hierarchical([(2, 1.2e10), (3, 1.25e9)]),
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_random_plans_run_under_all_schedules_and_climbing_makes_them_no_slower(cluster: Cluster) -> None:
    draw, judge = random.Random(1), Judge(PROFILE, cluster)
    plans = [plan for _ in range(100) if (plan := random_plan(draw, PROFILE, cluster)) is not None]
    assert {str(plan.schedule) for plan in plans} >= {"gpipe", "interleaved", "pipedream", "spp", "zb-h1", "zb-v"}

    start = max(plans, key=judge.rate)
    assert judge.rate(start) > 0
    assert judge.simulated <= len(plans)
    climbed = climb(start, judge, random.Random(2), 60, PROFILE, cluster)
    assert judge.rate(climbed) >= judge.rate(start)
