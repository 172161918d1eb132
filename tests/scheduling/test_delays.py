"""How old gradients are: what a method promises is what its programs show once the pipe is full."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduling.actions import Backward, BackwardWeight, Update
from penstock.scheduling.schedules import Schedule
from support.schedule_strategies import replicated_schedules, schedules, waiting_schedules


def found_delays(schedule: Schedule, minibatches: int) -> list[int]:
    """By stage, the most updates between a gradient's version and the one that it updates."""
    delays = [0] * schedule.stages
    for row in schedule.program(minibatches):
        taken: dict[tuple[int, int], int] = {}
        for action in row:
            match action:
                case Backward(stage, microbatch, version) | BackwardWeight(stage, microbatch, version):
                    of = microbatch // schedule.guarantees.microbatches_per_update[stage] + 1
                    taken[stage, of] = version
                case Update(stage, version) if (stage, version) in taken:
                    delays[stage] = max(delays[stage], version - 1 - taken[stage, version])
                case _:
                    pass
    return delays


def enough(schedule: Schedule) -> int:
    """This number of minibatches fills the pipe and goes on."""
    return 4 + 3 * (max(schedule.guarantees.delays) + 1) * schedule.microbatches_per_update // schedule.microbatches


@settings(max_examples=150)
@given(st.one_of(schedules(6, 10), replicated_schedules(4, 3, 10), waiting_schedules(5, 8)))
def test_the_delay_is_what_the_programs_show(schedule: Schedule) -> None:
    """That of replicas is the delay of their rounds; updates that wait are no later in numbers."""
    assert tuple(found_delays(schedule, enough(schedule))) == schedule.guarantees.delays


@pytest.mark.parametrize(
    ("schedule", "delays"),
    [
        (Schedule("pipedream", 4, 8), (3, 2, 1, 0)),
        (Schedule("pipedream", 4, 8, vertical_sync=True), (3, 3, 3, 3)),
        (Schedule("2bw", 4, 8), (1, 1, 1, 1)),
        (Schedule("2bw", 1, 1), (1,)),
        (Schedule("1f1b-flush", 4, 8), (0, 0, 0, 0)),
    ],
)
def test_delays_of_small_pipelines(schedule: Schedule, delays: tuple[int, ...]) -> None:
    assert schedule.guarantees.delays == delays
