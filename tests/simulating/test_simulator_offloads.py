"""Offloads in the simulator, worked out by hand: the host's link, what waits for it, and the memory."""

from dataclasses import replace
from pathlib import Path

import pytest

import penstock
from penstock.errors import PlanError, ScheduleError
from penstock.scheduling import define_by_programs
from penstock.simulating import evaluate, simulate
from penstock.simulating.critical_paths import critical_path
from penstock.timelines.timelines import Timeline
from penstock.values import Cluster, LayerProfile, Plan, Profile

PROFILE = Profile((LayerProfile("", 1.0, 2.0, 0.0, 12.0, 0.0),), 1)
ROW = "0F0@0 0H0 0F1@0 0H1 0F2@0 0F3@0 0D0 0B0@0 0D1 0B1@0 0B2@0 0B3@0 0U1<0"
CLUSTER = replace(Cluster.uniform(1, 1e9), host_bandwidth=12.0)


def plan_of(row: str = ROW, **options: bool) -> Plan:
    return Plan.uniform(1, 1, define_by_programs("by hand", row), 4, **options)  # type: ignore[arg-type]


def run(bandwidth: float, row: str = ROW, **options: tuple[float, ...]) -> Timeline:
    cluster = replace(CLUSTER, host_bandwidth=bandwidth)
    return simulate(plan_of(row), PROFILE, cluster, optimizer_copies=0, **options)  # type: ignore[arg-type]


def times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {span.action: (span.start_seconds, span.stop_seconds) for span in timeline.spans}


def test_copies_run_beside_the_computation_each_direction_one_at_a_time() -> None:
    """12 bytes take 1 s: an offload runs during the next forward, and the backward waits for its reload."""
    found = times(run(12.0))

    assert [found[f"0F{k}@0"] for k in range(4)] == [(k, k + 1) for k in range(4)]
    assert [found["0H0"], found["0H1"]] == [(1, 2), (2, 3)]
    assert [found["0D0"], found["0B0@0"]] == [(4, 5), (5, 7)]
    assert [found["0D1"], found["0B1@0"]] == [(7, 8), (8, 10)]


def test_an_action_waits_for_what_was_offloaded_before_the_last_one() -> None:
    """12 bytes take 4 s. The first copy ends at 5: the third forward waits for it, and the fourth for the second copy,
    which ends at 9. The first reload has the other direction for itself.
    """
    found = times(run(3.0))

    assert [found[f"0F{k}@0"] for k in range(4)] == [(0, 1), (1, 2), (5, 6), (9, 10)]
    assert [found["0H0"], found["0H1"]] == [(1, 5), (5, 9)]
    assert [found["0D0"], found["0B0@0"]] == [(10, 14), (14, 16)]


def test_the_order_says_for_which_action_the_memory_is_free() -> None:
    """12 bytes take 4 s, from 1 to 5. The action behind the reload waits as well, whatever the offload says."""
    row = ROW.replace("0H1 ", "").replace("0D1 ", "")
    begun = {behind: times(run(3.0, row.replace("0H0", f"0H0+{behind}"))) for behind in (1, 2, 3, 4, 8)}
    texts = [f"0{what}@0" for what in ("F1", "F2", "F3", "B0")]

    assert begun[2] == times(run(3.0, row))
    assert {behind: [int(found[text][0]) for text in texts] for behind, found in begun.items()} == {
        1: [5, 6, 7, 12],
        2: [1, 5, 6, 11],
        3: [1, 2, 5, 10],
        4: [1, 2, 3, 9],
        8: [1, 2, 3, 9],
    }
    with pytest.raises(ScheduleError, match=r"expected 0H0\+8, found 0H0\+9"):
        plan_of(row.replace("0H0", "0H0+9"))


@pytest.mark.parametrize(("behind", "bytes_"), [(1, 36), (2, 36), (3, 48), (4, 48)])
def test_memory_is_held_until_that_action_or_the_reload(behind: int, bytes_: float) -> None:
    row = f"0F0@0 0F1@0 0H1+{behind} 0F2@0 0F3@0 0B0@0 0D1 0B1@0 0B2@0 0B3@0 0U1<0"
    assert evaluate(plan_of(row), PROFILE, CLUSTER, optimizer_copies=0).peak_bytes == (bytes_,)


def test_a_reload_begins_when_its_offload_has_ended() -> None:
    """So does what the rank computes next."""
    found = times(run(3.0, "0F0@0 0H0 0D0 0F1@0 0B0@0 0B1@0 0F2@0 0B2@0 0F3@0 0B3@0 0U1<0"))

    assert [found["0H0"], found["0D0"], found["0F1@0"], found["0B0@0"]] == [(1, 5), (5, 9), (5, 6), (9, 11)]


def test_what_shares_a_host_waits_alike() -> None:
    assert times(run(3.0, slowdowns=(1.0,))) == times(run(3.0))


def test_memory_is_free_when_a_copy_has_ended_and_taken_when_it_comes_back() -> None:
    (memory,) = run(12.0).memory
    held = dict(memory.activations)

    assert [(at, held[at]) for at in sorted(held)] == [
        *((0, 12), (1, 24), (2, 24), (3, 24), (4, 36), (7, 36), (10, 24), (12, 12), (14, 0))
    ]
    assert evaluate(plan_of(), PROFILE, CLUSTER, optimizer_copies=0).peak_bytes == (36,)
    without = " ".join(word for word in ROW.split() if word[1] not in "HD")
    assert evaluate(plan_of(without), PROFILE, CLUSTER, optimizer_copies=0).peak_bytes == (48,)


def test_what_a_stage_received_stays() -> None:
    """The second stage received 5 of its 12 bytes."""
    layer = LayerProfile("", 1.0, 2.0, 5.0, 12.0, 0.0)
    row = "0F0@0 0F1@0 0F2@0 0B0@0 0B1@0 0B2@0 0U1<0\n1F0@0 1H0 1F1@0 1F2@0 1D0 1B0@0 1B1@0 1B2@0 1U1<0"
    plan = Plan.uniform(2, 2, define_by_programs("by hand", row), 3)
    timeline = simulate(plan, Profile((layer, layer), 1), replace(Cluster.uniform(2, 1e9), host_bandwidth=14.0))
    (copy,) = (span for span in timeline.spans if span.action == "1H0")

    assert copy.seconds == pytest.approx(0.5)
    assert [size for _, size in timeline.memory[1].activations] == [12, 24, 29, 36, 24, 12, 0]


def test_a_cluster_without_the_bandwidth_and_a_plan_that_recomputes_are_refused() -> None:
    with pytest.raises(PlanError, match=r"0H0: the schedule offloads, and host_bandwidth of the cluster is None: exp"):
        simulate(plan_of(), PROFILE, Cluster.uniform(1, 1e9))
    with pytest.raises(PlanError, match="0H0: the schedule offloads what stage 0 saves, and the plan recomputes"):
        simulate(plan_of(recompute=True), PROFILE, CLUSTER)


def test_the_bytes_on_the_host_stay_within_their_limit() -> None:
    """At most two microbatches of 12 bytes are there at once; or one, which leaves room for another one."""
    simulate(plan_of(), PROFILE, replace(CLUSTER, host_bytes=24.0))
    row = "0F0@0 0H0 0F1@0 0D0 0B0@0 0F2@0 0H2 0F3@0 0B1@0 0D2 0B2@0 0B3@0 0U1<0"
    simulate(plan_of(row), PROFILE, replace(CLUSTER, host_bytes=12.0))
    with pytest.raises(PlanError, match="0H1 of rank 0: expected at most 23 bytes on the host, host_bytes"):
        simulate(plan_of(), PROFILE, replace(CLUSTER, host_bytes=23.0))


def test_the_critical_path_leads_over_copies_that_are_waited_for() -> None:
    path = [span.action for span in critical_path(run(3.0))]

    assert path == ["0F0@0", "0H0", "0H1", "0F3@0", "0D0", "0B0@0", "0D1", "0B1@0", "0B2@0", "0B3@0", "0U1<0"]


def test_a_picture_has_a_row_for_the_copies(tmp_path: Path) -> None:
    timeline = run(3.0)
    timeline.save_trace(tmp_path / "trace.json")

    assert set(Timeline.load_trace(tmp_path / "trace.json").spans) == set(timeline.spans)
    assert penstock.render(timeline).splitlines()[4:8] == [
        "rank 0 stage 0  0  1  .  .  .  2  .  .  .  3  .  .  .  . [0   ] .  .  .  . [1   ][2   ][3   ]U",
        "       host       v0~~~~~~~~~~v1~~~~~~~~~~   ^0~~~~~~~~~~      ^1~~~~~~~~~~",
        "",
        " 3  forward of microbatch 3   [3]  its backward   v3  its offload   ^3  its reload   U  update   .  idle",
    ]
    assert penstock.render(penstock.schedule(plan_of())).splitlines()[5:7] == [
        "rank 0 stage 0  0  1  2  3 [0][1][2][3]U",
        "       host       v0 v1    ^0 ^1",
    ]
