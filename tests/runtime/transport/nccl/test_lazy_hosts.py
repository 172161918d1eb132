"""Ranks do not deadlock if their hosts block until their device is done, wherever they compute."""

import pytest

from penstock.scheduling.definitions import Drain, Step
from penstock.scheduling.schedules import Schedule
from support.simulated.lazy_hosts import LazyHosts


def name(schedule: Schedule) -> str:
    """The name of a test case."""
    return f"{schedule.method}-{schedule.ranks}-{schedule.microbatches}"


SCHEDULES = (
    Schedule("gpipe", 3, 4),
    Schedule("1f1b-flush", 2, 4),
    Schedule("1f1b-flush", 4, 6),
    # In these, two ranks send to each other, and compute before they receive.
    Schedule("interleaved", 2, 4, stages_per_rank=2),
    Schedule("interleaved", 4, 8, stages_per_rank=2),
    Schedule("spp", 2, 4),
    Schedule("spp", 4, 4),
    Schedule("zb-h1", 3, 4),
    Schedule("zb-v", 2, 2, stages_per_rank=2),
    Schedule("zb-v", 4, 8, stages_per_rank=2),
    Schedule("pipedream", 4, 1),
    Schedule("2bw", 4, 4),
)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_hosts_that_block_wherever_they_compute_do_not_deadlock(schedule: Schedule, seed: int) -> None:
    hosts = LazyHosts(schedule, seed, seconds=20.0)

    assert hosts.run([*(Step(minibatch) for minibatch in range(3)), Drain(3)]) == []
    assert all(notices.announcing for notices in hosts.notices)


SEGMENTS = (*(Step(minibatch) for minibatch in range(6)), Drain(6))


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("method", ["gpipe", "1f1b-flush", "zb-h1", "pipedream", "2bw"])
def test_some_schedules_need_no_notices(method: str, ranks: int) -> None:
    """Their ranks receive before they compute on."""
    hosts = LazyHosts(Schedule(method, ranks, 2 * ranks), 0, seconds=20.0)

    assert hosts.run(SEGMENTS, announcing=3) == []


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s.method in ("interleaved", "spp", "zb-v")], ids=name)
def test_without_notices_others_deadlock(schedule: Schedule) -> None:
    """Enqueueing a receive when it is wanted is not enough: each rank's send waits for the other rank's receive."""
    found = LazyHosts(schedule, 0, seconds=1.0).run(SEGMENTS, announcing=3)

    assert any("waits for a device that waits for another rank" in error for error in found)
