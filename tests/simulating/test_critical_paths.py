"""The critical path of a timeline: by hand, and the laws of a chain of causes on random simulations."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.scheduling.schedules import Schedule
from penstock.simulating import simulate
from penstock.simulating.critical_paths import critical_path
from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Routing, Stage
from penstock.values.profiles import LayerProfile, Profile
from support.simulation_problems import problems


def actions(timeline: Timeline) -> list[str]:
    return [f"{span.rank}:{span.action}" for span in critical_path(timeline)]


def make_profile(*layers: tuple[float, float, float, float]) -> Profile:
    return Profile(tuple(LayerProfile("", f, b, cut, 0, weights) for f, b, cut, weights in layers), 1)


def test_slow_stage_is_on_the_path_of_all_its_microbatches() -> None:
    timeline = simulate(Schedule("gpipe", 2, 2), make_profile((1, 1, 2, 0), (5, 5, 0, 0)), Cluster.uniform(2, 1.0))

    assert actions(timeline) == [
        "0:0F0@0",
        "0:0S0>1",
        "1:1R0<0",
        "1:1F0@0",
        "1:1R1<0",
        "1:1F1@0",
        "1:1B0@0",
        "1:1B1@0",
        "1:1S1>0",
        "0:0R1<1",
        "0:0B1@0",
        "0:0U1<0",
    ]


def test_slow_link_is_on_the_path_of_all_its_messages() -> None:
    timeline = simulate(Schedule("gpipe", 2, 2), make_profile((1, 1, 9, 0), (2, 2, 0, 0)), Cluster.uniform(2, 1.0))

    assert actions(timeline)[:4] == ["0:0F0@0", "0:0S0>1", "0:0S1>1", "1:1R1<0"]


def test_path_goes_through_the_replica_that_came_last() -> None:
    """Three microbatches on two replicas: rank 0 has two of them, and rank 1 waits for it."""
    plan = Plan((Stage(0, 1, (0, 1)),), "gpipe", 3)
    timeline = simulate(plan, make_profile((1, 1, 0, 4)), Cluster.uniform(2, 1.0), overlap_reduce=False)

    assert actions(timeline) == ["0:0F0@0", "0:0F2@0", "0:0B0@0", "0:0B2@0", "0:0A1", "0:0U1<0"]


def test_nothing_has_no_path() -> None:
    assert critical_path(Timeline((), 1)) == ()


def test_measured_times_need_not_touch() -> None:
    spans = (
        Span(0, "0F0@0", 0.0, 1.0),
        Span(0, "0S0>1", 1.1, 1.5),
        Span(1, "1R0<0", 0.1, 1.6),
        Span(1, "1F0@0", 1.7, 3.0),
    )

    assert critical_path(Timeline(spans, 2)) == spans


@settings(max_examples=80, deadline=None)
@given(problems(), st.booleans())
def test_path_is_a_chain_of_causes_over_the_whole_time(problem: tuple, overlap: bool) -> None:
    """From 0 to the end; each span ends when its successor starts, or while that one waits for it."""
    _, plan, profile, cluster, minibatches = problem
    timeline = simulate(plan, profile, cluster, minibatches, overlap=overlap, overlap_reduce=False)
    path = critical_path(timeline)
    most = max(
        (cluster.latency(a, b) for a in range(timeline.ranks) for b in range(timeline.ranks) if a != b), default=0
    )

    assert path[0].start_seconds == 0
    assert path[-1].stop_seconds == timeline.seconds
    assert all(any(span is other for other in timeline.spans) for span in path)
    for earlier, later in pairwise(path):
        assert earlier.stop_seconds <= later.stop_seconds + most
        if overlap and later.kind == "send":
            assert later.start_seconds <= earlier.stop_seconds + 1e-9
        if later.kind not in ("receive", "reduce", "send"):
            assert abs(earlier.stop_seconds - later.start_seconds) <= (0 if overlap else most) + 1e-9
        if later.kind == "receive" and overlap and later.seconds > 0:
            assert earlier.stop_seconds == later.stop_seconds


@pytest.mark.parametrize("routing", ["round-robin", "split"])
@pytest.mark.parametrize("latency", [0.0, 0.5])
def test_messages_of_other_ranks_on_a_shared_link_are_on_the_path(routing: Routing, latency: float) -> None:
    """Two servers of two ranks, one slow link between them: nearly all of the path is messages, without a gap."""
    plan = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2, 3))), "gpipe", 4, routing=routing)
    cluster = Cluster.hierarchical([(2, 8.0), (2, 1.0)], latency_seconds=[0.0, latency])
    timeline = simulate(plan, make_profile((1, 1, 4, 0), (1, 1, 0, 0)), cluster, shared_nic=True)

    path = critical_path(timeline, server_ranks=2)

    assert path[0].start_seconds == 0
    assert all(later.start_seconds <= earlier.stop_seconds for earlier, later in pairwise(path))
    assert sum(span.seconds for span in path if span.kind == "send") >= 0.75 * timeline.seconds


def test_the_ranks_of_a_server_are_a_count() -> None:
    with pytest.raises(PlanError, match="server_ranks"):
        critical_path(Timeline((Span(0, "0F0@0", 0.0, 1.0),), 1), server_ranks=0)
