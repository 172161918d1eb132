"""The norms of gradients that a stage has when it updates: of which stages, and for which update.

A norm over all gradients of a model (to clip them, or to check that none is infinite) needs a number from every stage.
If the schedule gives an update time to wait, each stage gets the norms of all stages for the same update: those of
later stages are sent from the last stage to the first, and those of earlier stages from the first to the last. Under
`pipedream` an update must not wait for earlier stages, because these have their gradients later. Stage s then uses the
norms of earlier stages that stage s - 1 had two updates earlier; these are the latest that arrive without a stall. The
first updates have no norms of earlier stages, unless their run continues another one.

A weight that several stages share counts in the norm of the first of them only.
"""

from typing import TypeAlias

from penstock.scheduling.definitions import NormRule
from penstock.scheduling.schedules import Schedule

Norm: TypeAlias = tuple[int, int]
"""A stage and a version: the norm of the stage's gradients for its update to this version."""


def known_norms(schedule: Schedule, stage: int, version: int) -> tuple[Norm, ...]:
    """The norms that `stage` has at its update to `version`, its own included, in ascending order of the stages.

    The result is empty if the schedule has no norms.
    """
    if schedule.norm_rule is NormRule.NONE:
        return ()
    return (*_earlier(schedule, stage, version), *((other, version) for other in range(stage, schedule.stages)))


def carried_norms(schedule: Schedule, stage: int, version: int, target: int) -> tuple[Norm, ...]:
    """The norms that `stage` sends its neighbor `target` at its update to `version`, in the order of the message."""
    if target < stage:
        return tuple((other, version) for other in range(stage, schedule.stages))
    return (*_earlier(schedule, stage, version), (stage, version))


def _earlier(schedule: Schedule, stage: int, version: int) -> tuple[Norm, ...]:
    """The norms of earlier stages that `stage` has at its update to `version`."""
    lag = 2 if schedule.norm_rule is NormRule.LAGGED else 0
    known = ((other, version - lag * (stage - other)) for other in range(stage))
    return tuple((other, of) for other, of in known if of > 0 or schedule.continued)
