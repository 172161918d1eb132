"""What a planner counts in memory is what the schedule promises."""

import pytest

from penstock.planning.memory import live_counts
from penstock.scheduling.schedules import schedule
from penstock.values import Plan


@pytest.mark.parametrize(
    ("method", "vertical_sync"),
    [("gpipe", False), ("1f1b-flush", False), ("1f1b", False), ("1f1b", True), ("2bw", False)],
)
def test_planner_and_schedule_agree_on_what_is_live(method, vertical_sync):
    for stages in range(1, 6):
        for microbatches in range(stages, 2 * stages + 1):
            made = schedule(Plan.uniform(stages, stages, method, microbatches, vertical_sync=vertical_sync))
            for stage in range(stages):
                promised = (made.in_flight(stage), made.versions(stage))
                behind = stages - stage

                assert promised == live_counts(method, microbatches, 1, behind, stages, vertical_sync=vertical_sync)
