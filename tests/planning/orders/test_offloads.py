"""Which microbatches are offloaded: by hand, never slower than without, within the limit, and above the bound."""

from dataclasses import replace
from math import inf
from random import Random

import pytest

import penstock
from penstock import Cluster, LayerProfile, Plan, PlanError, Profile
from penstock.planning import find_order
from penstock.planning.orders.bounds import bound_of
from penstock.planning.orders.offloads import offload_order
from penstock.planning.orders.rows import OrderCosts
from penstock.simulating import evaluate
from support.directed_links import directed_cluster
from support.paper_plans import language_model

PROFILE = Profile((LayerProfile("", 1.0, 2.0, 0.0, 12.0, 0.0),), 1)


def offloaded(limit: float, bandwidth: float, host_bytes: float = inf, microbatches: int = 4) -> str | None:
    """The row of one rank, which takes 12 bytes for each microbatch without offloads."""
    cluster = replace(Cluster.uniform(1, 1e9), host_bandwidth=bandwidth, host_bytes=host_bytes)
    made = offload_order(
        "found", Plan.uniform(1, 1, "gpipe", microbatches), PROFILE, cluster, [limit], optimizer_copies=0
    )
    if made is None:
        return None
    assert max(evaluate(made, PROFILE, cluster, optimizer_copies=0).peak_bytes) <= limit
    assert evaluate(made, PROFILE, cluster, optimizer_copies=0).minibatch_seconds == 3 * microbatches
    (row,) = made.definition.programs
    return row.replace("@0", "")


def test_the_longest_lived_leaves_and_is_back_in_time() -> None:
    """At 3, microbatch 1 is the one that is away and lives longest. Between 4 and 6, it is microbatch 2."""
    assert offloaded(48, 12.0) == "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 0U1<0"
    assert offloaded(36, 12.0) == "0F0 0F1 0H1 0F2 0H2 0F3 0D1 0B0 0D2 0B1 0B2 0B3 0U1<0"
    row = "0F0 0F1 0F2 0F3 0H3 0F4 0F5 0B0 0B1 0D3 0B2 0B3 0B4 0B5 0U1<0"
    assert offloaded(60, 12.0, microbatches=6) == row, "microbatch 3 alone, which has left at 5 and is away longest"


def test_a_long_copy_frees_its_memory_later() -> None:
    """12 bytes take 2 s: microbatch 2 has left at 5, when the last forward begins, and comes back from 9 on."""
    row = "0F0 0F1 0F2 0H2+3 0F3 0F4 0F5 0B0 0D2 0B1 0B2 0B3 0B4 0B5 0U1<0"
    assert offloaded(60, 6.0, microbatches=6) == row


def test_a_round_trip_that_would_end_too_late_is_not_made() -> None:
    """The second action would wait for a copy of 1.5 s, and one of 1 s cannot free the memory for 24 bytes."""
    assert offloaded(36, 8.0) is None
    assert offloaded(24, 12.0) is None


def test_the_host_has_room_for_what_leaves() -> None:
    assert offloaded(36, 12.0, host_bytes=24) == offloaded(36, 12.0)
    assert offloaded(36, 12.0, host_bytes=23) is None


def test_the_bound_has_the_bytes_per_second_of_the_host() -> None:
    """By hand: a microbatch keeps rank 0 for 2 + 0.5 + 1 + 3 + 0.25 + 2 and 1 more, and waits 4.75 of it."""
    times = {"forward": (2.0, 1.0), "backward": (2.0, 3.0), "weight": (1.0, 2.0), "activation": (0.5,)}
    costs = OrderCosts((0, 1), 8, gradient=(0.25,), saved=(1.0, 1.0), limits=(1.0, 9.0), **times)  # type: ignore[arg-type]

    assert bound_of(costs).seconds == 8 * 9.75
    assert bound_of(replace(costs, movable=(0.5, 0.5), host_bandwidth=1.0)).seconds == 8 * (9.75 - 0.5 * 4.75)
    assert bound_of(replace(costs, movable=(1.0, 1.0), host_bandwidth=0.1)).seconds == 8 * 9.75 / (1 + 0.1 * 4.75)
    assert bound_of(replace(costs, movable=(1.0, 1.0), host_bandwidth=9.0)).reason == "rank 1's work"


GPT = language_model()
PLAN = Plan.balanced([layer.forward_seconds for layer in GPT.layers], 4, microbatches=8)


@pytest.mark.parametrize("times", [0.8, 1.0])
def test_no_order_without_offloads_is_faster(times: float) -> None:
    links = directed_cluster(Random(0), 4, bandwidth=12e9, latency=1e-3)
    slow, fast = (replace(links, host_bandwidth=bandwidth) for bandwidth in (2e9, 60e9))
    limit = times * max(evaluate(PLAN, GPT, slow).peak_bytes)
    without = find_order(PLAN, GPT, replace(slow, host_bandwidth=None), memory_bytes=limit)
    for cluster in (slow, fast):
        found = find_order(PLAN, GPT, cluster, memory_bytes=limit)
        plan = found.plan
        assert plan.predicted == evaluate(plan, GPT, cluster)
        assert max(plan.predicted.peak_bytes) <= limit
        assert found.bound.seconds <= without.bound.seconds * (1 + 1e-9)
        assert plan.predicted.minibatch_seconds <= without.plan.predicted.minibatch_seconds  # type: ignore[union-attr]
        penstock.verify(penstock.schedule(plan))
    offloads = sum(row.count("H") for row in plan.definition.programs)
    gain = 1 - plan.predicted.minibatch_seconds / without.plan.predicted.minibatch_seconds  # type: ignore[union-attr]
    assert (offloads > 0, gain > 0.1) == ((True, True) if times == 0.8 else (False, False))


def test_a_plan_that_recomputes_has_no_offloads() -> None:
    cluster = replace(Cluster.uniform(4, 12e9), host_bandwidth=60e9)
    with pytest.raises(PlanError, match="expected an order that takes at most"):
        find_order(replace(PLAN, recompute=True), GPT, cluster, memory_bytes=1e9)
