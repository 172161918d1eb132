"""The rows that a worker runs, step after step, are those of the schedule, however they are made."""

from contextlib import suppress
from dataclasses import replace
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.scheduling.actions import parse
from penstock.scheduling.definitions import Step
from penstock.scheduling.repeated_steps import RepeatedSteps
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.continuations import continue_run
from support.own_schedules import LATE
from support.schedule_strategies import replicated_schedules, schedules, waiting_schedules

drawn = st.one_of(schedules(4, 6), waiting_schedules(4, 6), replicated_schedules(3, 3, 6))


def continued(schedule: Schedule) -> Schedule:
    try:
        return continue_run(schedule)
    except ScheduleError:
        return schedule


@settings(max_examples=80)
@given(drawn, st.booleans(), st.booleans(), st.integers(0, 2))
def test_the_rows_are_those_of_the_schedule(schedule: Schedule, continues: bool, recomputes: bool, places: int) -> None:
    schedule = continued(schedule) if continues else schedule
    if recomputes and not schedule.continued:
        schedule = replace(schedule, recomputed=frozenset(range(schedule.stages)))
        if places and schedule.flushes and not schedule.ties:
            # Replicas without a microbatch are no streamed ones where backwards are split.
            with suppress(ScheduleError):
                schedule = replace(schedule, streamed=schedule.recomputed, places=places)
    cycle = lcm(*map(schedule.placement.stride, range(schedule.stages)))
    for rank in range(schedule.ranks):
        steps = RepeatedSteps(schedule, rank)
        for minibatch in range(2 * max(schedule.stages, schedule.ranks) + 3 * cycle + 3):
            assert steps.row(minibatch) == schedule.row(rank, Step(minibatch)), (rank, minibatch)


def test_a_step_that_does_not_follow_the_last_one_is_made_anew() -> None:
    schedule = Schedule("2bw", 2, 2)
    steps = RepeatedSteps(schedule, 0)

    for minibatch in (0, 1, 2, 3, 4, 9, 10, 3, 0, 1):
        assert steps.row(minibatch) == schedule.row(0, Step(minibatch))


def test_the_steps_of_a_schedule_of_the_users_own_may_all_differ() -> None:
    schedule = Schedule(LATE, 2, 2)

    assert not schedule.steps_alike
    for rank in range(2):
        steps = RepeatedSteps(schedule, rank)
        assert [steps.row(step) for step in range(6)] == [schedule.row(rank, Step(step)) for step in range(6)]


@pytest.mark.parametrize("method", ["1f1b-flush", "2bw"])
def test_a_repeated_step_has_later_microbatches_and_versions(method: str) -> None:
    steps = RepeatedSteps(Schedule(method, 1, 2), 0)
    read = 8 if method == "1f1b-flush" else 7

    rows = [steps.row(minibatch) for minibatch in range(9)]

    text = f"0F16@{read} 0B16@{read} 0F17@{read} 0B17@{read} 0U9<{read}"
    assert rows[-1] == tuple(map(parse, text.split()))
