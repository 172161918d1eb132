"""Programs that are broken on purpose, and what the verifier says of them."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from penstock.errors import ScheduleError
from penstock.scheduling.actions import format_programs, parse_programs
from penstock.scheduling.schedules import Programs, Schedule


def change(schedule: Schedule, minibatches: int, changes: str) -> Programs:
    """The schedule's program with words replaced, "old -> new; old -> new"; each must be there once."""
    text = format_programs(schedule.program(minibatches))
    for each in changes.split("; ") if changes else ():
        old, _, new = each.partition(" ->")
        text, count = re.subn(rf"(?<!\S){re.escape(old)}(?!\S)", new.strip(" "), text)
        assert count == 1, old
    return parse_programs(text)


def complaint(call: Callable[[], object]) -> list[str]:
    """The lines of the error."""
    with pytest.raises(ScheduleError) as caught:
        call()
    return str(caught.value).splitlines()


def promising(schedule: Schedule, **promises: Any) -> Schedule:
    """A schedule of the same order that guarantees something else."""
    method = schedule.definition
    facts = {name: promises.pop(name) for name in list(promises) if name in {field.name for field in fields(method)}}
    other = replace(method, guarantees=lambda shape: replace(method.guarantees(shape), **promises), **facts)
    return replace(schedule, method=other)
