"""A timeline says where its time goes."""

from penstock.scheduling.schedules import Schedule
from penstock.simulating import simulate
from penstock.timelines.timelines import Timeline
from penstock.values import Cluster, LayerProfile, Profile


def simulated(*seconds: float, cut_bytes: float = 0.0) -> Timeline:
    layers = (LayerProfile(str(index), own, own, cut_bytes, 0, 0) for index, own in enumerate(seconds))
    return simulate(Schedule("gpipe", len(seconds), 4), Profile(tuple(layers), 1), Cluster.uniform(len(seconds), 1.0))


def test_the_slow_stage_and_the_rank_that_waits_for_it_are_named() -> None:
    """Stage 1 takes three seconds where stage 0 takes one: 1 + 4 x 3 forward, and as much back."""
    lines = simulated(1, 3).explain().splitlines()

    assert lines[0].startswith("2 ranks, 26 s.")
    assert lines[1] == "  rank 0 (stage 0): 31%, 69%, 0%; it is idle 0%"
    assert lines[2].startswith("  rank 1 (stage 1): 92%")
    assert lines[3] == "Rank 1 computes longest, 92% of the time."
    assert lines[4].startswith("The longest wait is that of rank 0 for messages from stage 1 to stage 0:")
    assert lines[5].startswith("Stage 1 computes 6 s for a microbatch and the others 2 s on average:")


def test_equal_stages_are_not_blamed() -> None:
    assert "for a microbatch" not in simulated(1, 1, cut_bytes=4).explain()


def test_nothing_needs_no_explanation() -> None:
    assert Timeline((), 1).explain() == "Nothing takes time in this timeline."
