"""The simulator on values past stages: relayed they load every link and stage on their way, directly one link."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import ProfileError
from penstock.scheduling.actions import parse_programs
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule
from penstock.simulating import Costs, execute, simulate
from penstock.simulating.critical_paths import critical_path
from penstock.simulating.outcomes import evaluate
from penstock.simulating.simulator import planned_schedule
from penstock.timelines.memories import RankMemory
from penstock.timelines.timelines import Timeline
from penstock.values.clusters import Cluster
from penstock.values.crossings import Crossing
from penstock.values.plans import Plan, schedule
from penstock.values.profiles import LayerProfile, Profile
from support import models
from support.schedule_strategies import schedules

MB = 1e6


def times(timeline: Timeline, rank: int) -> dict[str, tuple[float, float]]:
    return {s.action: (s.start_seconds, s.stop_seconds) for s in timeline.spans if s.rank == rank}


def sizes(timeline: Timeline) -> dict[str, float | None]:
    return {s.action: s.size_bytes for s in timeline.spans if s.kind in ("send", "receive")}


def make_profile(layers: int = 3, size: float = 6 * MB, own: float = 2 * MB, saved: float = 1 * MB) -> Profile:
    """Layers of a second forward and back; what the first makes for the last is in all cuts between."""
    made = tuple(LayerProfile(f"{i}", 1.0, 1.0, own + (size if i < layers - 1 else 0), saved, 0) for i in range(layers))
    return Profile(made, 1, crossings=(Crossing("skip", 0, (layers - 1,), size),))


def test_a_direct_message_has_a_link_of_its_own() -> None:
    """At 2 bytes/s: 2 bytes to the neighbour, 6 past it, and 4 from the neighbour on."""
    rows = parse_programs("0F0@0 0S0>1 0S0>2\n1R0<0 1F0@0 1S0>2\n2R0<0 2R0<1 2F0@0")
    costs = Costs((1.0,) * 3, (0.0,) * 3, cut_bytes=(2.0, 4.0), skips=(((0, 2), 6.0),), cluster=Cluster.uniform(3, 2.0))
    timeline = execute(rows, Placement.straight(3), costs)

    assert times(timeline, 0) == {"0F0@0": (0, 1), "0S0>1": (1, 2), "0S0>2": (1, 4)}
    assert times(timeline, 1) == {"1R0<0": (0, 2), "1F0@0": (2, 3), "1S0>2": (3, 5)}
    assert times(timeline, 2) == {"2R0<0": (0, 4), "2R0<1": (4, 5), "2F0@0": (5, 6)}
    assert sizes(timeline) == {"0S0>1": 2, "0S0>2": 6, "1R0<0": 2, "1S0>2": 4, "2R0<0": 6, "2R0<1": 4}


def test_a_plan_is_predicted_with_the_skips_that_a_pipeline_takes() -> None:
    profile, plan, cluster = make_profile(), Plan.uniform(3, 3, schedule="gpipe"), Cluster.uniform(3, 1 * MB)
    direct, relayed = simulate(plan, profile, cluster), simulate(schedule(plan), profile, cluster)

    assert planned_schedule(plan, profile).skips == ((0, 2),)
    assert sizes(direct)["0S0>1"] == sizes(direct)["1S0>0"] == 2 * MB
    assert sizes(direct)["0S0>2"] == sizes(direct)["2S0>0"] == 6 * MB
    assert sizes(relayed)["0S0>1"] == sizes(relayed)["2S0>1"] == 8 * MB
    # There: 1 + 8 + 1 + 8 + 1 seconds, and as long back; or 1 + max(2 + 1 + 2, 6) + 1.
    assert relayed.seconds == 38
    assert direct.seconds == 16
    assert evaluate(plan, profile, cluster).minibatch_seconds == 16
    assert "link between stages 0 and 2" in evaluate(plan, profile, Cluster.uniform(3, MB / 100)).limit


def test_small_values_are_relayed() -> None:
    profile = make_profile(size=9e4)

    assert planned_schedule(Plan.uniform(3, 3), profile).skips == ()


def held(memory: RankMemory) -> tuple[float, float]:
    return tuple(max((size for _, size in course), default=0.0) for course in (memory.activations, memory.buffers))  # type: ignore[return-value]


def test_a_stage_holds_what_it_relays_until_the_backward() -> None:
    profile, plan = make_profile(), Plan.uniform(3, 3, schedule="gpipe", microbatches=4)
    cluster = Cluster.uniform(3, float("inf"))
    direct, relayed = simulate(plan, profile, cluster), simulate(schedule(plan), profile, cluster)

    assert [held(memory)[0] for memory in direct.memory] == [4 * MB] * 3
    assert [held(memory)[0] for memory in relayed.memory] == [4 * MB, 28 * MB, 4 * MB]
    recomputed = replace(plan, recompute=True)
    # Its input is what the last stage keeps, directly or not; the one between keeps less of it.
    kept = [held(memory)[0] for memory in simulate(recomputed, profile, cluster).memory]
    passed = [held(memory)[0] for memory in _relayed(recomputed, profile, cluster).memory]
    assert (kept[1], passed[1]) == (4 * 2 * MB + MB, 4 * 8 * MB + MB)
    assert kept[2] == passed[2] == 4 * 8 * MB + MB


def _relayed(plan: Plan, profile: Profile, cluster: Cluster) -> Timeline:
    """`plan` with values so small a part that all are relayed, of which the profile tells nothing."""
    return simulate(plan, replace(profile, crossings=()), cluster)


def test_messages_past_stages_are_held_until_they_are_used() -> None:
    """A message of 6 MB waits at stage 2 for that of 2 MB, which stage 1 makes in 10 seconds."""
    slow = make_profile()
    layers = (slow.layers[0], replace(slow.layers[1], forward_seconds=10.0), slow.layers[2])
    profile, cluster = replace(slow, layers=layers), Cluster.uniform(3, 1 * MB)
    buffers = dict(simulate(Plan.uniform(3, 3, schedule="gpipe"), profile, cluster).memory[2].buffers)

    # Forward: it arrives at 1 + 6; stage 1 begins at 3 and ends at 13, its message is there at 15.
    assert buffers[7.0] == 6 * MB
    assert buffers[15.0] == 0


@given(schedules(5, 4), st.integers(10**5, 10**8), st.floats(0, 1e-2), st.booleans())
@settings(max_examples=30)
def test_no_schedule_gets_slower_or_larger(made: Schedule, size: int, latency: float, overlap: bool) -> None:
    if made.stages < 3 or made.stages_per_rank > 1:
        return
    profile, cluster = make_profile(made.stages, size), Cluster.uniform(made.ranks, 1e7, latency_seconds=latency)
    relayed = simulate(made, profile, cluster, 3, overlap=overlap)
    direct = simulate(replace(made, skips=((0, made.stages - 1),)), profile, cluster, 3, overlap=overlap)

    assert direct.seconds <= relayed.seconds * (1 + 1e-9)
    for rank in range(1, made.ranks - 1):
        assert held(direct.memory[rank])[0] < held(relayed.memory[rank])[0]
    for memory in direct.memory:
        assert all(course[-1][1] == 0 for course in (memory.activations, memory.buffers) if course)


def test_a_profiled_u_net_has_what_crosses(tmp_path: Path) -> None:
    model = models.UNet()
    profile = penstock.profile(model, (torch.zeros(4, 3, 16, 16),), iterations=1, warmup=1, progress=False)
    profile.save(tmp_path / "profile.json")

    # 4 samples of 4 channels: what the stem makes (16 x 16), and the first two levels down (8 x 8, 4 x 4).
    found = [(crossing.made, crossing.read, crossing.size_bytes) for crossing in profile.crossings]
    assert found == [(0, (1, 6), 64 * 16**2), (1, (2, 5), 64 * 8**2), (2, (3, 4), 64 * 4**2)]
    assert Profile.load(tmp_path / "profile.json") == profile
    assert planned_schedule(Plan.uniform(8, 4), profile).skips == ()
    assert planned_schedule(Plan.uniform(8, 4), profile.scaled(40)).skips == ((0, 3),)


def test_other_profiles_have_nothing_that_crosses(tmp_path: Path) -> None:
    profile = replace(make_profile(), crossings=())
    profile.save(tmp_path / "profile.json")

    assert "crossings" not in (tmp_path / "profile.json").read_text()
    assert Profile.load(tmp_path / "profile.json") == profile


def test_parts_and_multiples_of_a_profile_keep_what_crosses() -> None:
    profile = replace(make_profile(4), crossings=(Crossing("a", 0, (2, 3), 8.0), Crossing("b", 1, (3,), 4.0)))

    assert profile.prefix(3).crossings == (Crossing("a", 0, (2,), 8.0),)
    assert profile.scaled(2).crossings == (Crossing("a", 0, (2, 3), 16.0), Crossing("b", 1, (3,), 8.0))


@pytest.mark.parametrize(
    ("crossing", "complaint"),
    [
        (Crossing("a", 0, (3,), 1.0), "read \\(3,\\)"),
        (Crossing("a", 1, (1,), 1.0), "made 1 and read"),
        (Crossing("a", 0, (), 1.0), "one or more later ones"),
        (Crossing("a", 0, (2, 1), 1.0), "ascending"),
        (Crossing("a", 0, (2,)), "expected a number .* found inf"),
        ("a", "expected a Crossing, found 'a'"),
    ],
)
def test_wrong_crossings_are_refused(crossing: Crossing, complaint: str) -> None:
    with pytest.raises(ProfileError, match=rf"crossings\[0\]: .*{complaint}"):
        replace(make_profile(), crossings=(crossing,))


@pytest.mark.parametrize("overlap", [True, False])
def test_the_critical_path_goes_over_a_skip(overlap: bool) -> None:
    """The 6 MB past stage 1 take longer than all that stage 1 does."""
    profile, cluster = make_profile(), Cluster.uniform(3, 1 * MB)
    timeline = simulate(Plan.uniform(3, 3, schedule="gpipe"), profile, cluster, overlap=overlap)
    path = critical_path(timeline)

    assert (path[0].start_seconds, path[-1].stop_seconds) == (0, timeline.seconds)
    assert {"0S0>2", "2S0>0"} <= {span.action for span in path}
    assert "1F0@0" not in {span.action for span in path}


def test_pictures_and_traces_show_skips(tmp_path: Path) -> None:
    made = Schedule("gpipe", 3, 1, skips=((0, 2),))
    timeline = simulate(made, make_profile(), Cluster.uniform(3, 1 * MB))
    timeline.save_trace(tmp_path / "trace.json")
    timeline.save_svg(tmp_path / "picture.svg")

    assert "0S0>2" in (tmp_path / "trace.json").read_text()
    assert penstock.render(made) == penstock.render(replace(made, skips=()))
