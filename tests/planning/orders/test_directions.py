"""Links that differ by direction, as those of every measured cluster: gradients take the route back, in orders and in
bounds. The simulator judges; of tiny pipelines all orders are tried."""

from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import pytest

import penstock
from penstock import Cluster, LayerProfile, Plan, PlanError, Profile
from penstock.planning import find_order, frontier, limit_order
from penstock.planning.orders.bounds import Bound
from penstock.planning.orders.rows import ROUNDING, OrderCosts, text_of_rows, time_rows
from penstock.scheduling import define_by_programs
from penstock.simulating import evaluate
from support.directed_links import directed_cluster, drawn_plan, drawn_profile, transposed
from support.every_order import all_rows

FOUR = Profile(tuple(LayerProfile(str(k), 1.0, 2.0, 0.0, 1.0, 0.0, weight_seconds=1.0) for k in range(4)), 1)
DELAYS = ([[0.0, 5.0], [0.0, 0.0]], [[0.0, 0.0], [5.0, 0.0]], [[0.0, 0.101], [0.1, 0.0]])


def slow_one_way(delays: list[list[float]]) -> Cluster:
    return Cluster.from_matrix([[1e9] * 2] * 2, latency_seconds=delays)


@pytest.mark.parametrize("delays", DELAYS)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_slow_direction_by_hand(delays: list[list[float]], microbatches: int) -> None:
    """2 s, a message, 2 + 2 s, a message, and 4 s: weight parts of rank 1 are done by then."""
    cluster, plan = slow_one_way(delays), Plan.uniform(4, 2, microbatches=microbatches)
    found = find_order(plan, FOUR, cluster)

    assert found.plan.predicted is not None
    assert (
        found.bound.seconds <= found.plan.predicted.minibatch_seconds <= evaluate(plan, FOUR, cluster).minibatch_seconds
    )
    if microbatches == 1:
        by_hand = 10 + delays[0][1] + delays[1][0]
        assert found.bound.seconds == pytest.approx(by_hand, abs=1e-9)
        assert found.plan.predicted.minibatch_seconds == pytest.approx(by_hand, abs=1e-3)


def test_a_planner_and_a_frontier_take_measured_links() -> None:
    cluster = slow_one_way([[0.0, 5.0], [0.0, 0.0]])
    assert penstock.plan(FOUR, cluster, planner="order", microbatches=2, recompute=False).predicted is not None
    assert frontier(FOUR, cluster, microbatches=1, limits=(1.0,)).points


def test_a_bound_above_a_step_is_refused_and_says_what_to_send() -> None:
    with pytest.raises(PlanError, match=r"expected no step below 20\.0 s .*found one of 15\.0 s.*open an issue"):
        Bound(20.0, "rank 0's work").gap(15.0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("numbers", [range(4), *(range(first, first + 50) for first in range(4, 504, 50))], ids=str)
def test_no_order_is_faster_than_the_bound(numbers: range) -> None:
    """On a cluster and on the transposed one, under a limit or without."""
    checked = 0
    for number in numbers:
        draw = Random(number)
        ranks = draw.randint(2, 4)
        profile, count = drawn_profile(draw, draw.randint(ranks, 10)), ranks * draw.randint(1, 3)
        plan = drawn_plan(draw, len(profile.layers), ranks, count)
        cluster = directed_cluster(draw, ranks, latency=draw.choice([0.1, 8.0]))
        moves, overlap = draw.random() < 0.3, draw.random() < 0.7
        for used in (cluster, transposed(cluster)):
            before = evaluate(plan, profile, used, overlap=overlap)
            limit = max(before.peak_bytes) * draw.choice([9.0, draw.uniform(0.6, 1.5)])
            try:
                found = find_order(
                    plan, profile, used, memory_bytes=limit, move_cuts=moves, choose_recompute=moves, overlap=overlap
                )
                limit_order(plan, profile, used, memory_bytes=limit, overlap=overlap)
            except PlanError as error:
                assert "found none" in str(error)
                continue
            predicted = found.plan.predicted
            assert predicted is not None and predicted == evaluate(found.plan, profile, used, overlap=overlap)
            assert max(predicted.peak_bytes) <= limit
            assert 0 <= found.gap < 1 and found.bound.seconds <= predicted.minibatch_seconds * (1 + 1e-9)
            if max(before.peak_bytes) <= limit:
                assert predicted.minibatch_seconds <= before.minibatch_seconds
            checked += 1
    assert checked > len(numbers)


def fastest_of_all(plan: Plan, profile: Profile, cluster: Cluster, limit: float) -> float:
    """The seconds of the fastest order within `limit`, by the simulator, whichever backwards are split."""
    ranks = tuple(held[0] for held in plan.placement.stages)
    each, free = (1.0,) * len(ranks), (0.0,) * (len(ranks) - 1)
    seconds = []
    for whole in (frozenset(range(len(ranks))), frozenset[int]()):
        costs = OrderCosts(
            ranks, plan.microbatches, each, each, each, free, free, each, (inf,) * plan.ranks, whole=whole
        )
        for rows in product(*(all_rows(costs, rank) for rank in range(plan.ranks))):
            if time_rows(costs, list(rows)) is not None:
                text = text_of_rows(costs, list(rows), repeats=False)
                outcome = evaluate(replace(plan, schedule=define_by_programs("one", text)), profile, cluster)
                if max(outcome.peak_bytes) <= limit:
                    seconds.append(outcome.minibatch_seconds)
    return min(seconds, default=inf)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(14))
def test_of_tiny_pipelines_no_order_beats_the_bound(seed: int) -> None:
    draw = Random(seed)
    ranks, count = (2, 3) if seed == 12 else draw.choice([(2, 2), (3, 2)])
    profile = drawn_profile(draw, ranks)
    plan = Plan.uniform(ranks, ranks, microbatches=count, recompute=draw.choice([(), (0,)]))
    cluster = directed_cluster(draw, ranks, latency=8.0)
    for used in (cluster, transposed(cluster)):
        peak = max(evaluate(plan, profile, used).peak_bytes)
        for limit in (9 * peak, draw.uniform(0.7, 1.0) * peak):
            best = fastest_of_all(plan, profile, used, limit)
            try:
                found = find_order(plan, profile, used, memory_bytes=limit)
            except PlanError:
                assert best == inf
                continue
            assert found.plan.predicted is not None
            assert found.bound.seconds <= best * ROUNDING
            assert best <= found.plan.predicted.minibatch_seconds * ROUNDING
