"""Continued runs: their programs read what an endless run reads, and are proved as those of fresh runs are."""

import pytest

from penstock.errors import ScheduleError
from penstock.scheduling import Fetch, Forward, Placement, Schedule, parse, verify, verify_programs
from penstock.scheduling.verification.continuations import continue_run, resize_run, steps_until_made
from support.own_schedules import LATE, ROLLING

EVERY = frozenset(range(4))
STREAMED = Schedule("breadth-first", 2, 4, 2, recomputed=EVERY, streamed=EVERY, places=1)
SCHEDULES = {
    "pipedream": Schedule("pipedream", 4, 1),
    "several microbatches": Schedule("pipedream", 3, 5),
    "vertical": Schedule("pipedream", 4, 2, vertical_sync=True),
    "2bw": Schedule("2bw", 3, 4),
    "tied": Schedule("2bw", 3, 4, ties=((0, 2),)),
    "norms": Schedule("2bw", 3, 4, norms=True),
    "replicas": Schedule.placed("pipedream", Placement(((0, 1, 2), (3, 4))), 2),
    "streamed": STREAMED,
    "own": Schedule(LATE, 3, 4),
    "own of microbatches": Schedule(ROLLING, 3, 2),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_continued_run_is_the_endless_one_seen_from_the_cut(name: str) -> None:
    schedule = SCHEDULES[name]
    continued, sizes = continue_run(schedule), schedule.guarantees.microbatches_per_update
    # A multiple of all rounds, so that replicas take the same turns.
    ahead = 60
    for minibatch in range(6):
        for here, there in zip(continued.step(minibatch), schedule.step(minibatch + ahead), strict=True):
            versions = [action.version for action in here if isinstance(action, Forward)]
            endless = [
                action.version - ahead * schedule.microbatches // sizes[action.stage]
                for action in there
                if isinstance(action, Forward)
            ]
            assert versions == endless


def test_a_continued_run_reads_versions_before_its_first() -> None:
    continued = continue_run(Schedule("pipedream", 3, 1))

    assert [str(row[0]) for row in continued.step(0)] == ["0F0@-2", "1R0<0", "2R0<1"]
    assert str(continued.program(4)[0][-1]) == "0U4<1"
    assert "0U1<-2" in map(str, continued.program(4)[0])
    for row in continued.program(4):
        assert [parse(str(action)) for action in row] == list(row)


def test_streamed_stages_stay_so_in_other_runs() -> None:
    for run in (continue_run(STREAMED), resize_run(STREAMED, 3)):
        assert [str(action) for action in run.step(2)[0] if isinstance(action, Fetch)] == ["0G2", "2G2", "0G2"]


def test_a_wrong_version_in_a_continued_run_is_found() -> None:
    continued = continue_run(Schedule("2bw", 2, 2))
    verify(continued)
    programs = continued.program(3)
    fresh = Schedule("2bw", 2, 2).program(3)

    with pytest.raises(ScheduleError, match="expected: version -1 for microbatch 0 on stage 0"):
        verify_programs(fresh, continued, 3)
    with pytest.raises(ScheduleError, match="expected: version 0 for microbatch 0 on stage 0"):
        verify_programs(programs, Schedule("2bw", 2, 2), 3)


@pytest.mark.parametrize(
    ("schedule", "minibatches", "steps"),
    [
        (Schedule("1f1b-flush", 3, 4), 2, 0),
        (Schedule("pipedream", 1, 1), 5, 0),
        (Schedule("pipedream", 4, 1), 2, 3),
        (Schedule("pipedream", 4, 1), 9, 3),
        (Schedule("pipedream", 4, 4), 9, 1),
        (Schedule("2bw", 3, 4), 1, 1),
        (Schedule("2bw", 3, 4, ties=((0, 2),)), 3, 2),
    ],
    ids=str,
)
def test_the_steps_until_all_stages_have_updated(schedule: Schedule, minibatches: int, steps: int) -> None:
    assert steps_until_made(schedule, minibatches) == steps
