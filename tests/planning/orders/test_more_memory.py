"""More memory never gives a slower order, whether or not cuts and recomputation change.

`pytest --all-cases tests/planning/orders/test_more_memory.py` tries two hundred random stages.
"""

from dataclasses import replace
from math import nextafter

import pytest

from penstock import Cluster, LayerProfile, Plan, PlanError, Profile
from penstock.planning import find_order
from penstock.planning.orders.judged_stages import JudgedStages
from penstock.planning.orders.ladder import limits_of
from penstock.simulating import evaluate
from support.limited_problems import SHARES, limited_problem
from support.paper_plans import language_model


def seconds_under(plan: Plan, profile: Profile, cluster: Cluster, limit: float, *, moves: bool) -> float | None:
    """The seconds of a step under a limit; None if nothing fits."""
    try:
        found = find_order(
            plan, profile, cluster, memory_bytes=limit, move_cuts=moves, choose_recompute=moves
        ).plan.predicted
    except PlanError as error:
        assert "found none" in str(error)
        return None
    assert found is not None and max(found.peak_bytes) <= limit * (1 + 1e-9)
    return found.minibatch_seconds


def test_stages_that_fit_may_be_worse_than_those_that_are_sought_where_nothing_fits() -> None:
    """Stages [0, 1) and [1, 4) fit in 28 bytes; in 24.9 nothing does, and others are found that are faster."""
    layer = LayerProfile("0", 1.0, 2.0, 0.108, 4.0, 0.0, weight_seconds=1.0)
    profile = Profile(
        (
            layer,
            replace(layer, name="1", cut_bytes=0.086, parameter_bytes=3.06, workspace_bytes=1.19),
            replace(layer, name="2", cut_bytes=0.0, parameter_bytes=0.674),
            replace(layer, name="3", cut_bytes=0.21),
        ),
        1,
        split_share=0.08,
    )
    plan = Plan.of_cuts((0, 1, 4), 2, microbatches=9, recompute=(1,))
    limits = 24.911, 28.339, 35.194
    seconds = [seconds_under(plan, profile, Cluster.uniform(2, 1e9), limit, moves=True) for limit in limits]

    assert seconds[0] is not None and seconds[0] <= 72.001
    assert seconds == sorted(seconds, key=lambda each: -(each or 0.0))
    assert seconds[2] is not None and seconds[2] <= 60.001


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("moves", [True, False])
# The first is the one that the suite runs: three stages of which nothing fits under the lowest limit.
@pytest.mark.parametrize("seed", sorted(range(100), key=lambda seed: seed != 13))
def test_no_step_gets_longer_with_more_memory(seed: int, *, moves: bool) -> None:
    plan, profile, cluster, usual = limited_problem(seed)
    best = float("inf")
    for share in SHARES:
        seconds = seconds_under(plan, profile, cluster, share * usual, moves=moves)
        if seconds is None:
            assert best == float("inf")
        else:
            assert seconds <= best * 1.001
            best = min(best, seconds)


def test_a_limit_within_a_rounding_of_a_peak_is_as_large() -> None:
    profile, cluster = language_model(), Cluster.uniform(4, 12e9)
    weights = [layer.forward_seconds for layer in profile.layers]
    plan = Plan.balanced(weights, 8, "v-min", microbatches=8, stages_per_rank=2)
    named = evaluate(plan, profile, cluster)
    seconds = seconds_under(plan, profile, cluster, nextafter(max(named.peak_bytes), 0.0), moves=False)

    assert seconds is not None and seconds <= named.minibatch_seconds


def test_limits_of_a_ladder_let_one_more_microbatch_in() -> None:
    """Two equal stages of 3 bytes for each of 8 microbatches, without weights; `gpipe` takes 24 bytes."""
    profile = Profile(tuple(LayerProfile(str(k), 1.0, 2.0, 0.0, 3.0, 0.0) for k in range(2)), 1)
    stages = JudgedStages(Plan.uniform(2, 2, microbatches=8), profile, Cluster.uniform(2, 1e9), {})

    assert limits_of(stages)[-5:] == (3.0, 6.0, 9.0, 15.0, 24.0)
