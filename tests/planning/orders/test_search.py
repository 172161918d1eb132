"""The order of a plan is found under a limit in bytes: never slower than a named one that fits, bounded and proved."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

import penstock
from penstock import Cluster, DeviceKind, Plan, Profile
from penstock.planning import FoundOrder, find_order
from penstock.simulating import evaluate
from support.directed_links import directed_cluster
from support.paper_plans import GB, language_model

NAMED = ("gpipe", "1f1b-flush", "spp", "zb-h1")


PROFILE = language_model()
CLUSTER = Cluster.uniform(4, 12 * GB)


def plan_of(profile: Profile, ranks: int, microbatches: int, *, folded: bool = False) -> Plan:
    weights = [layer.forward_seconds for layer in profile.layers]
    if folded:
        return Plan.balanced(weights, 2 * ranks, "zb-v", microbatches=microbatches, stages_per_rank=2)
    return Plan.balanced(weights, ranks, microbatches=microbatches)


def peak_of(plan: Plan) -> float:
    return max(evaluate(plan, PROFILE, CLUSTER).peak_bytes)


def judge(found: FoundOrder, limit: float = float("inf"), cluster: Cluster = CLUSTER) -> float:
    """The seconds of what was found, which is proved, fits, and is not below its bound."""
    plan = found.plan
    assert plan.predicted == evaluate(plan, PROFILE, cluster)
    assert max(plan.predicted.peak_bytes) <= limit
    assert found.bound.seconds <= plan.predicted.minibatch_seconds * (1 + 1e-9)
    assert found.gap == found.bound.gap(plan.predicted.minibatch_seconds)
    assert penstock.verify(penstock.schedule(plan)).in_flight == penstock.schedule(plan).guarantees.in_flight
    return plan.predicted.minibatch_seconds


@pytest.mark.sampled(2)
@pytest.mark.parametrize("times", [0.75, 1.25])
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("cluster", [CLUSTER, directed_cluster(Random(0), 4, bandwidth=12 * GB, latency=1e-2)])
def test_no_named_order_that_fits_is_faster(times: float, *, folded: bool, cluster: Cluster) -> None:
    plan = plan_of(PROFILE, 4, 8, folded=folded)
    limit = times * peak_of(plan_of(PROFILE, 4, 8))
    named = [replace(plan, schedule=name) for name in (("zb-v",) if folded else NAMED)]
    outcomes = [evaluate(each, PROFILE, cluster) for each in named]

    found = find_order(plan, PROFILE, cluster, memory_bytes=limit)
    seconds = judge(found, limit, cluster)
    fitting = [each.minibatch_seconds for each in outcomes if max(each.peak_bytes) <= limit]
    assert all(seconds <= other for other in fitting)


def test_in_the_memory_of_1f1b_it_is_faster() -> None:
    plan = plan_of(PROFILE, 4, 8)
    limit = peak_of(plan)

    found = find_order(plan, PROFILE, CLUSTER, memory_bytes=limit)
    assert judge(found, limit) < 0.95 * evaluate(plan, PROFILE, CLUSTER).minibatch_seconds
    assert str(found.plan.schedule) == "found" and found.plan.planner == "order"
    assert found.gap < 0.12
    lines = found.plan.explain().splitlines()
    assert lines[0].split() == ["order", "step", "peak"]
    assert {line.split()[0] for line in lines[1:-1]} == {*NAMED, "interleaved", "found"}
    assert any(line.startswith("zb-h1") and line.endswith("too much memory") for line in lines)
    assert lines[-1].startswith("at most ") and found.bound.reason in lines[-1]


def test_without_a_limit_almost_nothing_is_left() -> None:
    """With all memory ranks wait only for the first and the last microbatch."""
    found = find_order(plan_of(PROFILE, 4, 8), PROFILE, CLUSTER)

    judge(found)
    assert found.gap < 0.02


def test_memory_of_the_devices_is_the_limit() -> None:
    plan = plan_of(PROFILE, 4, 8)
    limit = peak_of(plan)
    small = Cluster.uniform(4, 12 * GB, memory_bytes=limit)

    assert find_order(plan, PROFILE, small).plan == find_order(plan, PROFILE, CLUSTER, memory_bytes=limit).plan


def test_unequal_devices_have_times_and_memory_of_their_own() -> None:
    limit = peak_of(plan_of(PROFILE, 4, 8))
    kinds = [DeviceKind("slow", speed=0.5, memory_bytes=2 * limit), *[DeviceKind("fast", memory_bytes=limit)] * 3]
    mixed = CLUSTER.with_kinds(kinds)
    found = find_order(plan_of(PROFILE, 4, 8), PROFILE, mixed)

    seconds = judge(found, 2 * limit, mixed)
    assert found.bound.reason == "rank 0's work"
    assert max(found.plan.predicted.peak_bytes[1:]) <= limit if found.plan.predicted else False
    assert seconds <= evaluate(plan_of(PROFILE, 4, 8), PROFILE, mixed).minibatch_seconds


def test_whole_backwards_stay_whole() -> None:
    found = find_order(plan_of(PROFILE, 4, 8), PROFILE, CLUSTER, whole_backwards=True)

    judge(found)
    assert not penstock.schedule(found.plan).guarantees.splits


def test_recomputation_takes_a_forward_and_little_memory() -> None:
    plan = replace(plan_of(PROFILE, 4, 8), recompute=True)
    limit = max(evaluate(plan, PROFILE, CLUSTER).peak_bytes)

    found = find_order(plan, PROFILE, CLUSTER, memory_bytes=limit)
    judge(found, limit)
    assert found.plan.recompute and found.gap < 0.3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("folded", [False, True])
def test_an_order_of_many_microbatches_repeats_its_middle(tmp_path: Path, *, folded: bool) -> None:
    """The file of such a plan stays short, and serves other numbers of microbatches."""
    found = find_order(plan_of(PROFILE, 4, 200, folded=folded), PROFILE, CLUSTER)

    judge(found)
    assert found.gap < 0.05
    if str(found.plan.schedule) == "found":
        assert all(row.count(" | ") == 2 for row in found.plan.order)
        found.plan.save(tmp_path / "plan.yaml")
        assert Plan.load(tmp_path / "plan.yaml") == found.plan
        assert (tmp_path / "plan.yaml").stat().st_size < 40_000
        longer = replace(found.plan, microbatches=230, predicted=None)
        assert (
            penstock.verify(penstock.schedule(longer)).in_flight == penstock.schedule(found.plan).guarantees.in_flight
        )
