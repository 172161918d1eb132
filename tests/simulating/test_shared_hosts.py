"""Ranks of one host share its cores: exact small cases, and an independent small-step simulation."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.simulating import simulate
from penstock.simulating.event_simulation import SharedHost
from penstock.simulating.outcomes import evaluate
from penstock.values import Cluster, LayerProfile, Plan, Profile, Stage


def equal(stages: int, forward: float, backward: float) -> Profile:
    return Profile(tuple(LayerProfile(str(index), forward, backward, 0, 0, 0) for index in range(stages)), 1)


def test_two_that_overlap_slow_each_other_down() -> None:
    """Rank 0 alone for 1 s, both at half speed until rank 0's other 1 s of work is done at 3, then rank 1 alone."""
    sharing = SharedHost((1.0, 2.0))
    sharing.begin(0, 2.0, 0.0)
    sharing.begin(1, 3.0, 1.0)

    assert sharing.end() == (0, 3.0)
    assert sharing.end() == (1, 5.0)
    assert len(sharing) == 0


def test_more_ranks_than_were_measured_are_slower_in_proportion() -> None:
    sharing = SharedHost((1.0, 1.5))
    for rank in range(3):
        sharing.begin(rank, 4.0, 0.0)

    assert sharing.end() == (0, 4.0 * 1.5 * 3 / 2)


def test_a_single_rank_is_never_slowed_down() -> None:
    timeline = simulate(
        Plan.uniform(3, 1, "gpipe", 4), equal(3, 1.0, 2.0), Cluster.uniform(1, 1e9), slowdowns=(1.0, 9.0)
    )

    assert timeline.seconds == 4 * 9.0


def test_one_core_for_all_ranks_takes_the_sum_of_the_work() -> None:
    """With slowdown k for k ranks nothing is gained by a pipeline, whatever its schedule: a core is never idle."""
    for method in ("gpipe", "1f1b-flush", "spp"):
        plan = Plan.uniform(4, 4, method, 6)
        seconds = evaluate(
            plan, equal(4, 1.0, 2.0), Cluster.uniform(4, 1e9), slowdowns=(1.0, 2.0, 3.0, 4.0)
        ).minibatch_seconds
        assert seconds == pytest.approx(6 * 4 * 3.0)


def test_without_contention_nothing_changes() -> None:
    plan, profile, cluster = Plan.uniform(6, 3, "1f1b-flush", 5), equal(6, 1.0, 2.0), Cluster.uniform(3, 1e9)

    assert simulate(plan, profile, cluster, slowdowns=(1.0, 1.0, 1.0)) == simulate(plan, profile, cluster)


def test_factors_must_make_sense() -> None:
    plan, profile, cluster = Plan.uniform(2, 2), equal(2, 1.0, 1.0), Cluster.uniform(2, 1e9)
    with pytest.raises(PlanError, match=r"slowdowns\[1\]: expected a finite number above 0, found 0"):
        simulate(plan, profile, cluster, slowdowns=(1.0, 0.0))
    split = Plan((Stage(0, 2, (0, 1)),), "gpipe", routing="split")
    with pytest.raises(PlanError, match="slowdowns: expected none where replicas split"):
        simulate(split, profile, cluster, slowdowns=(1.0, 2.0))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
)
def test_work_is_done_at_the_rate_of_each_moment(jobs: list[tuple[int, int]], factors: list[int]) -> None:
    """Against steps so small that nothing begins or ends inside one; every moment is a multiple of 1/60 or smaller."""
    slowdowns = tuple(sorted(map(float, factors)))
    sharing = SharedHost(slowdowns)
    ends: dict[int, float] = {}
    waiting = sorted((start, rank, work) for rank, (start, work) in enumerate(jobs))
    while waiting or len(sharing):
        if len(sharing) and (not waiting or sharing.next_end() <= waiting[0][0]):
            rank, seconds = sharing.end()
            ends[rank] = seconds
        else:
            start, rank, work = waiting.pop(0)
            sharing.begin(rank, float(work), float(start))

    assert {rank: pytest.approx(end) for rank, end in _exact(jobs, sorted(factors)).items()} == ends


def _exact(jobs: list[tuple[int, int]], slowdowns: list[int]) -> dict[int, Fraction]:
    """By intervals between events, in exact fractions, all jobs looked at anew in each."""
    left = {rank: Fraction(work) for rank, (_, work) in enumerate(jobs)}
    now, ends = Fraction(0), {}
    while left:
        active = [rank for rank in left if jobs[rank][0] <= now]
        starts = [Fraction(jobs[rank][0]) for rank in left if jobs[rank][0] > now]
        rate = Fraction(1, slowdowns[len(active) - 1]) if active else Fraction(1)
        finish = [now + left[rank] / rate for rank in active]
        then = min([*starts, *finish])
        for rank in active:
            left[rank] -= (then - now) * rate
            if left[rank] == 0:
                ends[rank] = then
                del left[rank]
        now = then
    return ends
