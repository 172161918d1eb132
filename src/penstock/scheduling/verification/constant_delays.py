"""Constant delays: whether the versions that an order reads follow from its guarantees alone.

Then training can be computed without the order. It is so for Penstock's own schedules; others are checked here.
"""

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Forward
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.verifier import enough_minibatches


def require_constant_delays(schedule: Schedule) -> None:
    """Raises `ScheduleError` unless every forward reads the version that is `delays` before that of its own update."""
    guarantees = schedule.guarantees
    for row in schedule.program(enough_minibatches(schedule)):
        for action in row:
            if not isinstance(action, Forward):
                continue
            stage, round_ = action.stage, action.microbatch // guarantees.microbatches_per_update[action.stage]
            due = max(0, round_ - guarantees.delays[stage])
            if action.version != due:
                raise ScheduleError(
                    f"schedule {schedule.name!r}: expected the forward of microbatch {action.microbatch} on stage "
                    f"{stage} to read version {due}, as its guarantees state (rule {guarantees.rule.name}, "
                    f"{guarantees.versions[stage]} versions), found {action}: a reference can be computed only for "
                    "delays that are constant; correct the guarantees or the order"
                )
