"""The speed of steps, from timestamps that are given by hand."""

import pytest

from penstock.runtime.batches.results import ActionTiming
from penstock.runtime.devices.timestamps import HostTimer, Timestamp
from penstock.runtime.engine.step_records import Speed, StepRecord, measure_speed
from penstock.scheduling.actions import parse


def record(start: float, *busy: tuple[float, float], samples: int = 4, follows: bool = True) -> StepRecord:
    """A step of rank 1 that began at `start` and computed at these times."""
    timings: list[ActionTiming] = [(1, parse("1R0<0"), start, start + 0.5)]
    timings += [(1, parse(f"1F{k}@0"), begin, end) for k, (begin, end) in enumerate(busy)]
    return StepRecord(start, timings, samples, items=10.0 * samples, follows=follows)


class Clock(HostTimer):
    """A device that has reached second `reached`."""

    def __init__(self, reached: float) -> None:
        self.reached = reached

    def passed(self, timestamp: Timestamp) -> bool:
        assert isinstance(timestamp, float)
        return timestamp <= self.reached


STEPS = (
    record(0.0, (1.0, 2.0), follows=False),
    record(4.0, (5.0, 6.0), (5.5, 7.0), samples=6),
    record(10.0, (11.0, 12.0)),
)


def test_a_step_lasts_until_the_next_one_begins() -> None:
    speed = measure_speed(STEPS, HostTimer(), (1,))

    assert speed == Speed(steps=2, seconds=10.0, samples=10, items=100.0, idle_share=1 - 3 / 10)


def test_a_step_before_something_else_is_left_out() -> None:
    records = (*STEPS, StepRecord(20.0, [(1, parse("1F9@0"), 20.0, 29.0)]), record(30.0, (30.0, 31.0), follows=False))

    assert measure_speed(records, HostTimer(), (1,)) == measure_speed(STEPS, HostTimer(), (1,))


def test_steps_that_do_not_follow_each_other_last_until_their_last_action() -> None:
    records = [record(0.0, (1.0, 2.0)), StepRecord(3.0, ()), record(10.0, (13.0, 14.0), follows=False)]

    assert measure_speed(records, HostTimer(), (1,)) == Speed(2, 6.0, 8, 80.0, 1 - 2 / 6)


@pytest.mark.parametrize(("reached", "steps"), [(6.5, 1), (7.0, 1), (12.0, 2), (1.0, None)])
def test_work_that_a_device_has_not_done_is_not_waited_for(reached: float, steps: int | None) -> None:
    speed = measure_speed(STEPS, Clock(reached), (1,))

    assert (speed and speed.steps) == steps


def test_ranks_that_take_turns_have_no_idle_share() -> None:
    speed = measure_speed(STEPS, HostTimer(), (0, 1))

    assert speed is not None
    assert speed.idle_share is None


def test_items_are_known_if_all_steps_count_them() -> None:
    uncounted = StepRecord(4.0, (), 6, follows=True)
    speed = measure_speed((STEPS[0], uncounted, STEPS[2]), HostTimer(), (1,))

    assert speed is not None
    assert speed.items is None


def test_no_steps_have_no_speed() -> None:
    assert measure_speed((), HostTimer(), (0,)) is None
    assert measure_speed([StepRecord(0.0, ())], HostTimer(), (0,)) is None
