"""A plain step runs few functions of the library, in few calls, under few frames: a new option adds none of them."""

import pytest

from support.processes import Pool
from support.step_counts import count_step

MOST = {"1f1b-flush": (170, 1000), "2bw": (178, 1020), "interleaved": (175, 2050)}
MOST_OF_TWO = {"1f1b-flush": (185, 620), "2bw": (192, 640), "interleaved": (190, 1250)}
FRAMES = (10, 7)
"""Above the forward of a block, and above ``optimizer.step``."""


@pytest.mark.parametrize("schedule", MOST)
def test_a_step_of_one_process_stays_within_its_counts(schedule: str) -> None:
    (functions, calls), found = MOST[schedule], count_step(schedule)

    assert found.functions <= functions and found.calls <= calls, found
    assert found.above_block <= FRAMES[0] and found.above_step <= FRAMES[1], found


def test_a_step_of_two_processes_stays_within_its_counts(pool: Pool) -> None:
    for schedule, (functions, calls) in MOST_OF_TWO.items():
        for rank, found in enumerate(pool.run(2, count_step, schedule, 2)):
            assert found.functions <= functions and found.calls <= calls, (schedule, rank, found)
            assert found.above_block <= FRAMES[0] and found.above_step <= FRAMES[1], (schedule, rank, found)
