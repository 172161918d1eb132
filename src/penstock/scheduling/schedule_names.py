"""Finds the schedule of a name, lists those with a property, and suggests one for an unknown name."""

from collections.abc import Callable

from penstock.errors import suggestion
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.orders import AMBIGUOUS_NAMES, METHODS

SCHEDULES = tuple(method.name for method in METHODS)
"""The names of Penstock's own schedules."""

_BY_NAME = {method.name: method for method in METHODS}


def find_definition(schedule: object) -> ScheduleDefinition | None:
    """The definition that `schedule` is or names; None if there is none."""
    if isinstance(schedule, ScheduleDefinition):
        return schedule
    return _BY_NAME.get(schedule) if isinstance(schedule, str) else None


def identify(definition: ScheduleDefinition) -> ScheduleDefinition | str:
    """The name of `definition` if it is one of Penstock's own, else `definition`; a plan stores this."""
    return definition.name if definition in METHODS else definition


def has_taken_name(definition: ScheduleDefinition) -> bool:
    """Whether one of Penstock's own schedules has the name of `definition` and is not it."""
    return _BY_NAME.get(definition.name, definition) != definition


def schedule_hint(name: str) -> str:
    """A sentence and a space that say what the unknown `name` probably means, or nothing."""
    return AMBIGUOUS_NAMES.get(name.lower()) or suggestion(name, SCHEDULES)


def names_of(has: Callable[[ScheduleDefinition], bool], last: str = ", ") -> str:
    """The names of Penstock's own schedules for which `has` holds: ``gpipe, spp or 2bw`` with `last` " or "."""
    names = [method.name for method in METHODS if has(method)]
    return last.join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else "".join(names)
