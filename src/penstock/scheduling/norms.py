"""Which norms of gradients stages tell each other for an update; they are computed in runtime/parameters.

A norm over all gradients of a model needs a number from every stage. Each stage gets those of all stages for the same
update: those of later stages are sent from the last stage to the first, and those of earlier stages from the first to
the last. A weight that several stages share counts in the norm of the first of them only.
"""

from penstock.errors import ScheduleError
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.schedule_names import names_of


def carried_norms(stages: int, stage: int, target: int) -> range:
    """The stages whose norms `stage`, one of `stages`, sends its neighbor `target`, in the order of the message."""
    return range(stage, stages) if target < stage else range(stage + 1)


def require_common_updates(definition: ScheduleDefinition) -> None:
    """Raises `ScheduleError` if stages update at times of their own, and so without the norms of the others."""
    if not definition.synchronizes_updates:
        raise ScheduleError(
            f"schedule {definition.name!r}: clip_grad_norm=, loss_scale= and on_nonfinite='skip' or 'rollback' need "
            "the gradients of all stages for an update, and every stage updates at its own time; choose "
            f"{names_of(lambda each: each.defers_updates)!r} or a flushing schedule "
            f"({names_of(lambda each: each.flushes)}), or leave these options out"
        )
