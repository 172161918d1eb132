"""Moves of stages: by hand; steps under a limit get shorter, never longer; where nothing fitted a plan is found."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import Cluster, LayerProfile, Plan, PlanError, Profile
from penstock.planning import FoundOrder, find_order
from penstock.planning.orders.local_moves import StageMoves
from penstock.simulating import evaluate
from support.directed_links import directed_cluster
from support.paper_plans import language_model

PROFILE = Profile(tuple(LayerProfile(str(k), (1 + k) * 1e-3, (2 + k) * 1e-3, 1e3, 1e6, 1e3) for k in range(8)), 2)
CLUSTER = Cluster.uniform(3, 1e9)
PLAN = Plan.uniform(8, 3, microbatches=6)


def peak_of(plan: Plan, profile: Profile) -> float:
    return max(evaluate(plan, profile, CLUSTER).peak_bytes)


def moved(plan: Plan, profile: Profile, limit: float, cluster: Cluster = CLUSTER) -> FoundOrder:
    """The order and the stages that are found; proved, within the limit, and as the simulator says."""
    found = find_order(plan, profile, cluster, memory_bytes=limit, move_cuts=True, choose_recompute=True)
    penstock.verify(penstock.schedule(found.plan))
    outcome = evaluate(found.plan, profile, cluster)
    assert found.plan.predicted is not None
    assert max(outcome.peak_bytes) <= limit
    assert outcome.minibatch_seconds == found.plan.predicted.minibatch_seconds >= found.bound.seconds * (1 - 1e-9)
    return found


def test_a_move_is_a_cut_by_a_layer_or_a_stage_that_recomputes() -> None:
    plan = Plan.of_cuts((0, 1, 3), 2)
    cuts = [each.stages[0].stop for each in StageMoves(cuts=True).of(plan)]
    again = [each.recompute for each in StageMoves(recomputation=True).of(plan)]

    assert (cuts, again) == ([2], [(0,), (1,), True])
    assert [each.recompute for each in StageMoves(recomputation=True).of(replace(plan, recompute=(0,)))] == [
        False, True, True, False,
    ]  # fmt: skip
    assert not list(StageMoves().of(plan))


def test_under_a_limit_moves_shorten_the_step() -> None:
    """In half of the memory of `1f1b-flush`. Recomputation of all stages takes 0.226 s at least: rank 1's work."""
    limit = 0.5 * peak_of(PLAN, PROFILE)
    alone = find_order(PLAN, PROFILE, CLUSTER, memory_bytes=limit)
    whole = find_order(replace(PLAN, recompute=True), PROFILE, CLUSTER, memory_bytes=limit)
    found = moved(PLAN, PROFILE, limit)

    assert alone.plan.predicted is not None and whole.plan.predicted is not None and found.plan.predicted is not None
    assert found.plan.recompute == (0,) and [stage.stop for stage in found.plan.stages] == [4, 6, 8]
    assert found.plan.predicted.minibatch_seconds < 0.62 * alone.plan.predicted.minibatch_seconds
    assert found.plan.predicted.minibatch_seconds < 0.9 * whole.plan.predicted.minibatch_seconds
    assert found.gap < 0.07
    assert found == moved(PLAN, PROFILE, limit), "the same question has the same answer"


def test_all_stages_recompute_where_that_of_one_gains_nothing() -> None:
    """A transformer whose limit leaves room for one microbatch on the first stages."""
    profile = language_model(32, head=1.2)
    plan = Plan.balanced([layer.forward_seconds for layer in profile.layers], 4, microbatches=8)
    cluster = Cluster.uniform(4, 12e9)
    limit = 0.5 * max(evaluate(plan, profile, cluster).peak_bytes)
    whole = find_order(replace(plan, recompute=True), profile, cluster, memory_bytes=limit).plan.predicted
    found = find_order(plan, profile, cluster, memory_bytes=limit, move_cuts=True, choose_recompute=True).plan

    assert whole is not None and found.predicted is not None
    assert found.predicted.minibatch_seconds <= whole.minibatch_seconds


def test_where_nothing_fits_stages_are_moved_until_it_does() -> None:
    """The last layer saves as much as six others."""
    last = replace(PROFILE.layers[-1], saved_bytes=6e6)
    profile = Profile((*PROFILE.layers[:-1], last), 2)
    limit = 0.75 * peak_of(PLAN, profile)

    with pytest.raises(PlanError, match="found none"):
        find_order(PLAN, profile, CLUSTER, memory_bytes=limit)
    assert moved(PLAN, profile, limit).plan.stages != PLAN.stages


@settings(max_examples=2, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=8, max_size=8),
    st.sampled_from([0.5, 0.75, 1.0]),
    st.randoms(use_true_random=False),
)
def test_moves_are_never_worse(sizes: list[int], share: float, draw: Random) -> None:
    layers = (replace(layer, saved_bytes=1e6 * size) for layer, size in zip(PROFILE.layers, sizes, strict=True))
    profile = Profile(tuple(layers), 2)
    limit, cluster = share * peak_of(PLAN, profile), directed_cluster(draw, 3, bandwidth=1e6, latency=1e-2)
    try:
        before = find_order(PLAN, profile, cluster, memory_bytes=limit).plan.predicted
    except PlanError:
        return
    after = moved(PLAN, profile, limit, cluster).plan.predicted
    assert before is not None and after is not None and after.minibatch_seconds <= before.minibatch_seconds


def test_a_cut_moves_past_layers_that_send_much() -> None:
    """Behind the second of eight layers a message is small, behind the third large; the link is slow."""
    sizes = (1e8, 1e5, 3e8, 1e8, 1e8, 1e8, 1e8, 1e8)
    layers = (replace(PROFILE.layers[0], name=str(k), cut_bytes=size) for k, size in enumerate(sizes))
    profile = Profile(tuple(layers), 2)
    plan = Plan.of_cuts((0, 4, 8), 2)
    found = find_order(replace(plan, microbatches=6), profile, Cluster.uniform(2, 1e8), move_cuts=True)

    assert [stage.stop for stage in found.plan.stages] == [2, 8]
