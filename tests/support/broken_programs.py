"""Programs that are broken on purpose, and what the verifier says of them."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from penstock.errors import ScheduleError
from penstock.scheduling.actions import (
    format_programs,
    parse_programs,
)
from penstock.scheduling.schedules import Programs, Schedule
from penstock.scheduling.verification.verifier import verify_programs


def change(schedule: Schedule, minibatches: int, *changes: tuple[str, str]) -> Programs:
    """The schedule's program with words of its text replaced; each must be there once."""
    text = format_programs(schedule.program(minibatches))
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return parse_programs(text)


def complaint(call: Callable[[], object]) -> list[str]:
    """The lines of the error."""
    with pytest.raises(ScheduleError) as caught:
        call()
    return str(caught.value).splitlines()


def assert_broken(made: tuple, law: str, row: str, expected: str, fix: str) -> None:
    """`made`, a schedule, a number of minibatches and changes to that program, violates `law`, as the error says."""
    schedule, minibatches, *changes = made

    assert complaint(lambda: verify_programs(change(schedule, minibatches, *changes), schedule, minibatches)) == [
        f"schedule {schedule.name!r} violates an invariant: {law}",
        f"  {row}",
        f"  expected: {expected}",
        f"  fix: {fix}",
    ]


def promising(schedule: Schedule, **promises: Any) -> Schedule:
    """A schedule of the same order that guarantees something else."""
    method = schedule.definition
    facts = {name: promises.pop(name) for name in list(promises) if name in {field.name for field in fields(method)}}
    other = replace(method, guarantees=lambda shape: replace(method.guarantees(shape), **promises), **facts)
    return replace(schedule, method=other)
