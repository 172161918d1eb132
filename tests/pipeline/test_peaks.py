"""What a process holds at its peak is what the simulator says, and nothing is left behind."""

import pytest
import torch

from support.jobs.peak_jobs import Leftovers, Training, find_leftovers, measure_peaks
from support.processes import Pool

PREDICTED = [
    Training("gpipe"),
    Training("gpipe", "layers"),
    Training("interleaved", True),
    Training("zb-v", True),
    Training("pipedream", "layers"),
    Training("2bw", autocast=torch.bfloat16),
]
"""Every schedule and choice is tried on a GPU: test_gpu_memory.py."""


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_peaks_are_as_predicted(pool: Pool) -> None:
    outcomes = pool.run(2, measure_peaks, PREDICTED)
    for rank, found in enumerate(outcomes):
        for training, peak in zip(PREDICTED, found, strict=True):
            # The gradient of a batch's mean, a message more on its way: small things that no prediction has.
            assert peak.predicted == pytest.approx(peak.measured["allocated"], rel=0.05), f"{training}, rank {rank}"


def assert_nothing_left(left: Leftovers) -> None:
    assert left.early == left.late
    assert left.closed == left.kept > 0
    assert left.end == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("training", "fails"),
    [
        (Training("1f1b-flush"), False),
        (Training("2bw"), False),
        (Training("2bw"), True),
        (Training("pipedream", "layers"), True),
        (Training("2bw", away="host"), True),
    ],
    ids=str,
)
def test_nothing_is_left_behind(training: Training, fails: bool) -> None:
    assert_nothing_left(find_leftovers(training, fails))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fails", [False, True], ids=["whole", "failing"])
def test_nothing_is_left_behind_in_several_processes(pool: Pool, fails: bool) -> None:
    for left in pool.run(2, find_leftovers, Training("zb-v"), fails):
        assert_nothing_left(left)
