"""Outcomes: against timelines and closed forms, and the words for what limits a plan."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.scheduling.actions import parse_programs
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule
from penstock.simulating import Costs, simulate
from penstock.simulating.outcomes import evaluate, measure_loads, steady_lengths
from penstock.simulating.simulator import play
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import LayerProfile, Profile
from support.simulation_problems import problems


def make_profile(*layers: tuple[float, float, float, float, float]) -> Profile:
    """Layers of (forward seconds, backward seconds, cut bytes, saved bytes, parameter bytes), 4 samples."""
    return Profile(tuple(LayerProfile("", *layer) for layer in layers), 4)


@settings(max_examples=80, deadline=None)
@given(problems(), st.booleans())
def test_says_what_the_timeline_says(problem: tuple, overlap: bool) -> None:
    played, plan, profile, cluster, _ = problem
    outcome = evaluate(plan, profile, cluster, update_seconds_per_byte=0.25, overlap=overlap)
    timeline = simulate(plan, profile, cluster, update_seconds_per_byte=0.25, overlap=overlap)
    peaks = tuple(memory.peak_bytes for memory in timeline.memory)

    assert 0 <= outcome.bubble <= 1
    assert outcome.limit
    assert outcome.bottleneck_seconds * plan.microbatches <= outcome.minibatch_seconds * (1 + 1e-9)
    if played.flushes:
        assert outcome.minibatch_seconds == pytest.approx(timeline.seconds)
        assert outcome.bubble == pytest.approx(timeline.bubble, abs=1e-9)
        assert outcome.peak_bytes == pytest.approx(peaks)
    else:
        # A longer run can hold more at its peak, never less.
        assert all(one >= other - 1e-9 for one, other in zip(outcome.peak_bytes, peaks, strict=True))


def test_the_outcome_of_a_plan_by_hand() -> None:
    plan = Plan.uniform(2, 2, "gpipe", 4)
    outcome = evaluate(plan, make_profile((1, 2, 0, 5, 7), (1, 2, 0, 5, 7)), Cluster.uniform(2, float("inf")))

    assert (outcome.minibatch_seconds, outcome.bubble, outcome.bottleneck_seconds) == (15, 1 - 12 / 15, 3)
    assert outcome.samples_per_second == 16 / 15
    # Four microbatches and nothing of gradients, or three and the gradients: 5 bytes, 7 of a microbatch.
    assert outcome.peak_bytes == (4 * 7 + 3 * 5,) * 2
    assert outcome.limit == "stage 0 (compute 80% of the time)"


FAST = Cluster.uniform(8, float("inf"))
TWO = (Stage(0, 1, (0,)), Stage(1, 2, (1,)))


@pytest.mark.parametrize(
    ("plan", "profile", "cluster", "limit"),
    [
        (
            Plan(TWO, "2bw", 4),
            make_profile((1, 1, 0, 0, 0), (3, 3, 0, 0, 0)),
            FAST,
            "stage 1 (compute 100% of the time)",
        ),
        (
            Plan(TWO, "gpipe", 10),
            make_profile((1, 1, 3, 0, 0), (1, 1, 0, 0, 0)),
            Cluster.uniform(2, 1.0),
            "link between stages 0 and 1 (in use 94% of the time)",
        ),
        (
            Plan((Stage(0, 1, (0, 1)),), "gpipe", 2),
            make_profile((1, 1, 0, 0, 8)),
            Cluster.uniform(2, 1.0),
            "all-reduce of stage 0 (78% of the time)",
        ),
        (
            Plan.uniform(4, 4, "gpipe", 1),
            make_profile(*[(1, 1, 0, 0, 0)] * 4),
            FAST,
            "fill and drain of the pipeline (75% of the time; the busiest is stage 0 (compute 25% of the time))",
        ),
        (
            Plan.uniform(2, 2, "pipedream", 4),
            make_profile((1, 1, 0, 0, 0), (1, 1, 0, 0, 0)),
            Cluster.uniform(2, 1.0, latency_seconds=10.0),
            "round trips between the stages (83% of the time; the busiest is stage 0 (compute 17% of the time))",
        ),
        (Plan.uniform(4, 4, "gpipe", 1), make_profile(*[(0, 0, 0, 0, 0)] * 4), FAST, "nothing: no action takes time"),
        (
            Plan.of_cuts([0, 1, 2, 3, 4], 2, "interleaved", 4),
            make_profile(*[(1, 1, 0, 0, 0)] * 4),
            FAST,
            "rank 0 with stages 0, 2 (compute 89% of the time)",
        ),
    ],
)
def test_limit_names_what_takes_the_longest_part(plan: Plan, profile: Profile, cluster: Cluster, limit: str) -> None:
    assert evaluate(plan, profile, cluster).limit == limit


def test_messages_that_do_not_overlap_count_for_their_rank() -> None:
    """Thesis, section 3.4: computation plus communication in and out; the middle stage has both cuts, both ways."""
    plan = Plan.uniform(3, 3, "2bw", 6)
    profile = make_profile(*[(1, 2, 1, 0, 0)] * 3)
    cluster = Cluster.uniform(3, 1.0)
    outcome = evaluate(plan, profile, cluster, overlap=False)

    assert outcome.bottleneck_seconds == 3 + 4
    assert outcome.minibatch_seconds >= 6 * 7
    assert evaluate(plan, profile, cluster).bottleneck_seconds == 3


def test_profile_of_another_size_is_refused() -> None:
    with pytest.raises(PlanError, match="measured with 4 samples and the plan has 2"):
        evaluate(Plan.uniform(1, 1, microbatch_size=2), make_profile((1, 1, 0, 0, 0)), FAST)


@pytest.mark.parametrize(("stages", "lengths"), [(((0,), (1,), (2,), (3,)), [8, 16]), (((0, 1, 2), (3, 4)), [12, 24])])
def test_the_longer_run_fills_the_pipe_once_more_in_whole_periods(
    stages: tuple[tuple[int, ...], ...], lengths: list[int]
) -> None:
    """After six microbatches three and two replicas take the same ones again."""
    assert steady_lengths(Schedule.placed("pipedream", Placement(stages), 1)) == lengths


def test_a_link_is_in_use_while_there_is_a_message_in_either_direction() -> None:
    """Three messages of 6 s from 1 to 19 s; two of 1 s in the other direction while the last one of them is sent."""
    costs = Costs((1.0, 1.0), (0.5, 0.5), cut_bytes=(6.0,), cluster=Cluster.from_matrix([[0, 1], [6, 0]]))
    forwards = "0F0@0 0S0>1 0F1@0 0S1>1 0F2@0 0S2>1"
    rows = parse_programs(f"{forwards}\n1R0<0 1F0@0 1R1<0 1F1@0 1B0@0 1S0>0 1B1@0 1S1>0")
    run = play({rank: list(row) for rank, row in enumerate(rows)}, Placement.straight(2), costs)

    assert measure_loads(run, 1).pairs == {frozenset({0, 1}): 18.0}
