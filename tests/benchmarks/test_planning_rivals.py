"""The rivals of the search: the bounds that save simulations hold, and save none that matters."""

import random

import pytest

from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from planners.profiles import load_profiles
from planners.rate_bounds import RateBounds
from planners.rivals import Judge, climb, random_plan

PROFILE = load_profiles(None, ["gnmt"])["gnmt"]
CLUSTERS = {
    "slow links": Cluster.uniform(4, 1.25e8),
    "fast links": Cluster.uniform(4, 1.25e10),
    "servers": Cluster.hierarchical([(2, 1.2e10), (3, 1.25e9)]),
}


@pytest.fixture(params=CLUSTERS)
def cluster(request: pytest.FixtureRequest) -> Cluster:
    return CLUSTERS[request.param]


def random_plans(cluster: Cluster, draws: int) -> list[Plan]:
    draw = random.Random(1)
    return [plan for _ in range(draws) if (plan := random_plan(draw, PROFILE, cluster)) is not None]


def test_no_plan_is_faster_than_its_bound(cluster: Cluster) -> None:
    bounds, judge = RateBounds(PROFILE, cluster), Judge(PROFILE, cluster)
    plans = random_plans(cluster, 150)
    assert {str(plan.schedule) for plan in plans} >= {"gpipe", "interleaved", "pipedream", "spp", "zb-h1", "zb-v"}
    shares = [judge.rate(plan) / bounds.most(plan) for plan in plans]
    assert max(shares) <= 1
    # A bound that is far from every plan would save nothing.
    assert sorted(shares)[len(shares) // 2] > 0.7


def test_the_fastest_is_that_of_all_simulations_and_takes_fewer(cluster: Cluster) -> None:
    plans, judge = random_plans(cluster, 120), Judge(PROFILE, cluster)
    best = judge.fastest(plans)
    every = Judge(PROFILE, cluster)
    assert every.rate(best) == max(map(every.rate, plans))
    assert judge.simulated < every.simulated / 2


def test_climbing_is_the_same_as_with_all_simulations(cluster: Cluster) -> None:
    class Plain(Judge):
        def is_faster(self, plan: Plan, than: float) -> bool:
            return self.rate(plan) > than

    start = next(plan for plan in random_plans(cluster, 20) if Judge(PROFILE, cluster).rate(plan))
    quick, plain = (
        climb(start, judge(PROFILE, cluster), random.Random(2), 60, PROFILE, cluster) for judge in (Judge, Plain)
    )
    assert quick == plain
    assert evaluate(quick, PROFILE, cluster).samples_per_second >= (
        evaluate(start, PROFILE, cluster).samples_per_second
    )
