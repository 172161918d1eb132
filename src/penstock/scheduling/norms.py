"""What stages know of each other's gradients when they update: whose norms, and of which update.

A norm over all of a model's gradients (to clip them, to see that none is infinite) needs numbers of every stage. Where
the schedule gives an update time to wait, each stage learns those of all stages for the same update: they are collected
from the last stage to the first and then sent to all. Under `pipedream` an update must not wait for stages before it,
which have their gradients later. So stage s takes of them what stage s - 1 knew two updates earlier: the latest that
arrives without a stall. Of the first updates nothing is known.

A weight that stages share counts in the norm of the first of them only.
"""

from typing import TypeAlias

from penstock.scheduling.definitions import NormRule
from penstock.scheduling.schedules import Schedule

__all__ = ["Norm", "carried_norms", "known_norms"]

Norm: TypeAlias = tuple[int, int]
"""A stage and a version: the norm of the stage's gradients for the update to it."""


def known_norms(schedule: Schedule, stage: int, version: int) -> tuple[Norm, ...]:
    """The norms that `stage` has at its update to `version`, by stage ascending; its own is one of them.

    () if the schedule has no norms.
    """
    if schedule.norm_rule is NormRule.NONE:
        return ()
    return (*_earlier(schedule, stage, version), *((other, version) for other in range(stage, schedule.stages)))


def carried_norms(schedule: Schedule, stage: int, version: int, target: int) -> tuple[Norm, ...]:
    """The norms that `stage` sends its neighbor `target` at its update to `version`, in the order of the message."""
    if target < stage:
        return tuple((other, version) for other in range(stage, schedule.stages))
    if schedule.norm_rule is NormRule.LAGGED:
        return (*_earlier(schedule, stage, version), (stage, version))
    return known_norms(schedule, stage, version)


def _earlier(schedule: Schedule, stage: int, version: int) -> tuple[Norm, ...]:
    """Of the stages before `stage`."""
    lag = 2 if schedule.norm_rule is NormRule.LAGGED else 0
    known = ((other, version - lag * (stage - other)) for other in range(stage))
    return tuple((other, of) for other, of in known if of > 0)
