"""The memory of a GPU by its allocator's own counters: peaks as predicted, and no leaks. ``pytest -m gpu``.

With ``-rA`` all peaks are printed.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest
import torch

from support.jobs.peak_jobs import LARGE, Leftovers, Peak, Training, find_leftovers, measure_peak
from support.processes import Pool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Recording: TypeAlias = Callable[[str, object], None]
"""Notes a property in the report of a test."""
SCHEDULES = ("gpipe", "1f1b-flush", "interleaved", "zb-h1", "zb-v", "pipedream", "2bw")
MOST_ACTIVE = 1.25
"""Times the prediction. What has been dropped is active until the streams that read it are done with it, and a device
that has no more memory than what is active is full."""
SPLIT = ("zb-h1", "zb-v")
"""Backwards in two parts, which layers that are computed again one by one cannot have."""
PREDICTED = [
    Training(schedule, recompute, None, LARGE, "cuda:0")
    for schedule in SCHEDULES
    for recompute in (None, True, "layers")
    if not (schedule in SPLIT and recompute == "layers")
]
CAST = [Training(schedule, None, torch.bfloat16, LARGE, "cuda:0") for schedule in SCHEDULES]
LEAKING = [Training(schedule, None, None, LARGE, "cuda:0") for schedule in SCHEDULES]


def measure_ranks(pool: Pool, record: Recording, training: Training) -> list[tuple[str, Peak]]:
    """The peak of each rank, with a text about it, which is printed as well."""
    found = []
    for rank, peak in enumerate(pool.run(2, measure_peak, training)):
        reported = f"{training}, rank {rank}: {peak}"
        print(reported)
        record(f"rank {rank}", {"predicted": peak.predicted, **peak.measured})
        found.append((reported, peak))
    return found


@pytest.mark.parametrize("training", PREDICTED, ids=str)
def test_peaks_are_as_predicted(pool: Pool, record_property: Recording, training: Training) -> None:
    for reported, peak in measure_ranks(pool, record_property, training):
        assert peak.predicted == pytest.approx(peak.measured["allocated"], rel=0.05), reported
        assert peak.measured["active"] <= MOST_ACTIVE * peak.predicted, reported


@pytest.mark.parametrize("schedule", ["1f1b-flush", "pipedream", "2bw"])
def test_state_on_the_host_takes_no_memory(pool: Pool, record_property: Recording, schedule: str) -> None:
    """But for two parts of it in an update, of at most an eighth each."""
    kept, parts = Training(schedule, None, None, LARGE, "cuda:0"), 2**27
    ranks = zip(
        measure_ranks(pool, record_property, kept),
        measure_ranks(pool, record_property, replace(kept, away="host")),
        strict=True,
    )
    for (_, before), (reported, peak) in ranks:
        assert peak.predicted < before.predicted
        assert peak.measured["allocated"] < before.measured["allocated"] - (before.predicted - peak.predicted) + parts
        assert 0.95 * peak.predicted <= peak.measured["allocated"] <= 1.05 * peak.predicted + parts, reported


@pytest.mark.parametrize("training", CAST, ids=str)
def test_peaks_under_autocast_are_as_predicted(pool: Pool, record_property: Recording, training: Training) -> None:
    for reported, peak in measure_ranks(pool, record_property, training):
        assert peak.predicted >= 0.95 * peak.measured["allocated"], reported
        assert peak.measured["active"] <= MOST_ACTIVE * peak.predicted, reported
        # The input part of a backward gives back the weights that were cast for it, which no prediction knows.
        if training.schedule not in SPLIT:
            assert peak.predicted <= 1.05 * peak.measured["allocated"], reported


def assert_nothing_left(left: Leftovers) -> None:
    assert left.early == left.late
    # The allocator's blocks are somewhat larger than what is in them.
    assert 0 < left.kept <= left.closed <= 1.02 * left.kept
    assert left.end == 0


@pytest.mark.parametrize("training", LEAKING, ids=str)
@pytest.mark.parametrize("fails", [False, True], ids=["whole", "failing"])
def test_nothing_is_left_behind(training: Training, fails: bool) -> None:
    assert_nothing_left(find_leftovers(training, fails))


@pytest.mark.parametrize("recompute", [True, "layers"])
def test_nothing_is_left_behind_by_recomputation(recompute: bool | str) -> None:
    assert_nothing_left(find_leftovers(replace(LEAKING[1], recompute=recompute)))


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "failing"])
def test_nothing_is_left_behind_in_several_processes(pool: Pool, fails: bool) -> None:
    for left in pool.run(2, find_leftovers, LEAKING[1], fails):
        assert_nothing_left(left)
