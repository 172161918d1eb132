"""Other runs of a schedule: with other microbatches in a step, or going on where a run was cut; each with its proof.

A run can go on if the versions that an order reads follow from its guarantees alone: then training can also be computed
without the order. It is so for Penstock's own schedules; others are checked here.
"""

from dataclasses import replace
from functools import lru_cache
from math import lcm

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Forward, Update
from penstock.scheduling.definitions import Step
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.verifier import enough_minibatches, verify


@lru_cache(maxsize=16)
def continue_run(schedule: Schedule) -> Schedule:
    """The schedule of a run that continues another run of `schedule` at a version that all stages have made.

    Raises `ScheduleError` if the versions that the run reads do not follow from the guarantees, or are not kept.
    """
    guarantees = schedule.guarantees
    # Also in later steps, whose pipe is full; after a multiple of all rounds, so that replicas take the same turns.
    for first in (0, enough_minibatches(schedule) * lcm(*guarantees.microbatches_per_update)):
        require_constant_delays(schedule, first)
    for stage, (versions, delay) in enumerate(zip(guarantees.versions, guarantees.delays, strict=True)):
        if versions <= delay:
            raise ScheduleError(
                f"schedule {schedule.name!r}: stage {stage} reads weights that are {delay} updates old and keeps "
                f"{versions} versions: expected at least {delay + 1}. Guarantee more versions"
            )
    continued = replace(schedule, continued=True)
    verify(continued)
    return continued


@lru_cache(maxsize=1 << 9)
def resize_run(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule of a run of `schedule` with `microbatches` in a step. `ScheduleError` if there is none."""
    resized = replace(schedule, microbatches=microbatches)
    verify(resized)
    return resized


def steps_until_made(schedule: Schedule, minibatches: int) -> int:
    """How many more steps than `minibatches` it takes until all stages have updated from these minibatches."""
    if schedule.flushes:
        return 0
    sizes = schedule.guarantees.microbatches_per_update
    due = {
        (rank, stage, minibatches * schedule.microbatches // sizes[stage])
        for rank in range(schedule.ranks)
        for stage in schedule.stages_of(rank)
    }
    # Updates come at most as many steps after their minibatch as it takes to fill the pipe.
    for minibatch in range(max(0, minibatches - enough_minibatches(schedule)), minibatches):
        due -= _updates(schedule, minibatch)
    due = {each for each in due if each[2] > 0}
    more = 0
    while due:
        due -= _updates(schedule, minibatches + more)
        more += 1
    return more


def _updates(schedule: Schedule, minibatch: int) -> set[tuple[int, int, int]]:
    return {
        (rank, action.stage, action.version)
        for rank in range(schedule.ranks)
        for action in schedule.row(rank, Step(minibatch))
        if isinstance(action, Update)
    }


def require_constant_delays(schedule: Schedule, first: int = 0) -> None:
    """Raises `ScheduleError` unless every forward reads the version that is `delays` before that of its own update.

    `first`: the first of the steps that are looked at.
    """
    guarantees = schedule.guarantees
    steps = (schedule.step(minibatch) for minibatch in range(first, first + enough_minibatches(schedule)))
    for action in (action for step in steps for row in step for action in row):
        if isinstance(action, Forward):
            stage, round_ = action.stage, action.microbatch // guarantees.microbatches_per_update[action.stage]
            due = max(0, round_ - guarantees.delays[stage])
            if action.version != due:
                raise ScheduleError(
                    f"schedule {schedule.name!r}: expected the forward of microbatch {action.microbatch} on stage "
                    f"{stage} to read version {due}, as its guarantees state (rule {guarantees.rule.name}, "
                    f"{guarantees.versions[stage]} versions), found {action}: a reference can be computed only for "
                    "delays that are constant; correct the guarantees or the order"
                )
