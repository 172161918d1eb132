"""The runtime equals the oracle bit for bit: every schedule, in one process and in several."""

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from penstock.scheduling import METHODS
from support import models
from support.processes import Pool
from support.training import (
    FLUSHING,
    Case,
    assert_equal,
    assert_ranks_equal,
    run_cases,
    run_pipeline,
    run_reference,
    share_reference,
    stages_on_a_rank,
)

SCHEDULES = (*(method.name for method in METHODS), "vertical")
OPTIMIZERS = ("momentum", "adamw")


def case(subject: str, schedule: str, ranks: int, **more: Any) -> Case:
    """A case with the stages of the subject on `ranks` ranks: two stages per rank where the schedule has more than one.

    The optimizers take turns, so that each meets every schedule.
    """
    optimizer = OPTIMIZERS[(ranks + SCHEDULES.index(schedule)) % 2]
    if schedule == "interleaved":
        return Case(subject, schedule, ranks, 2 * ranks, optimizer, stages_per_rank=2, **more)
    return Case(subject, schedule, ranks, 4, optimizer, stages_per_rank=stages_on_a_rank(schedule), **more)


def in_turn(schedule: str, ranks: int, turn: int) -> str:
    """The subject of a schedule: over 1 to 4 `ranks` every schedule has every subject once in a turn."""
    return list(models.SUBJECTS)[(SCHEDULES.index(schedule) + ranks + 2 * turn) % len(models.SUBJECTS)]


@pytest.mark.parametrize("subject", ["skipping", "normalized"])
def test_the_oracle_trains_alike_under_all_schedules_that_flush(subject: str) -> None:
    for ranks, schedule in zip(cycle((2, 4)), FLUSHING, strict=False):
        tried = case(subject, schedule, ranks)
        assert_equal(share_reference(tried), run_reference(tried))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_process(schedule: str, ranks: int) -> None:
    tried = case(in_turn(schedule, ranks, 0), schedule, ranks)
    actual = run_pipeline(tried)

    assert_equal(share_reference(tried), actual)
    assert set(share_reference(tried).state) == set(actual.state)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_several_processes(pool: Pool, ranks: int) -> None:
    cases = [case(in_turn(schedule, ranks, 1), schedule, ranks) for schedule in SCHEDULES]
    assert_ranks_equal(pool.run(ranks, run_cases, cases), [share_reference(tried) for tried in cases])


def test_stages_may_be_on_any_rank(pool: Pool) -> None:
    """The first stage on the last rank, and so on: a planner that orders devices puts stages where links are fast."""
    cases = [replace(case("layered", schedule, 3), turned=True) for schedule in SCHEDULES]
    outcomes = pool.run(3, run_cases, cases)
    for tried, parts in zip(cases, zip(*outcomes, strict=True), strict=True):
        alone = run_pipeline(tried)
        for part in (*parts, alone):
            assert_equal(share_reference(replace(tried, turned=False)), part)
            assert part.evaluated == alone.evaluated is not None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_drained_runs_start_anew(schedule: str) -> None:
    tried = case("layered", schedule, 2, drain_after=(0, 2))

    assert_equal(share_reference(tried), run_pipeline(tried))
