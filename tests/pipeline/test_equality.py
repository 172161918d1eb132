"""The runtime equals the oracle bit for bit: every schedule with every option, in one process and in several."""

import os
import tempfile
from collections import Counter
from itertools import islice
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings

import penstock
from support.processes import Pool
from support.training import FLUSHING, Outcome, assert_equal
from support.trainings import (
    AT_ONCE,
    CHOICES,
    IN_PARTS,
    PLAIN,
    SCHEDULES,
    Training,
    allowed,
    ask_oracle,
    covering,
    draw_sharing,
    draw_streamed,
    draw_training,
    drawn_trainings,
    every_subject,
    expected_of,
    met_again,
    run_training,
    run_trainings,
)

COVERING = list(covering())
SUBJECTS = list(every_subject(COVERING))
IN_PROCESSES = met_again(COVERING)


def assert_runs(training: Training, found: list[Outcome]) -> None:
    """Both the run and what went on from its checkpoint have the bits of the oracle."""
    for expected, outcome in zip(expected_of(training), found, strict=True):
        assert_equal(expected, outcome)


def run_here(training: Training) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        return run_training(training, folder)


def test_every_option_meets_every_schedule_that_allows_it() -> None:
    """And each pair is in a fair share of what is drawn: no rule of `fitted` removes it from most cases."""
    met = {(training.schedule, *value) for training in COVERING + SUBJECTS for value in training.on}
    pairs = {(schedule, *each) for schedule in SCHEDULES for each in allowed(schedule)}
    assert met == {pair for pair in pairs if pair[2] != getattr(PLAIN, pair[1])}
    assert {pair for pair in met if pair[1] != "subject"} <= {(each.schedule, *v) for each in COVERING for v in each.on}
    subjects = Counter(training.subject for training in COVERING)
    assert subjects.keys() == CHOICES["subject"].keys()
    assert min(subjects.values()) >= 2

    kept = dict.fromkeys(pairs, 0)
    draws = Random(0)
    for schedule in SCHEDULES:
        for _ in range(700):
            training = draw_training(draws.choice, [schedule])
            for name in CHOICES:
                kept[schedule, name, getattr(training, name)] += 1
    assert min(kept.values()) >= 5, sorted(kept.items(), key=lambda item: item[1])[:5]


@pytest.mark.parametrize("subject", ["skipping", "normalized"])
def test_the_oracle_trains_alike_under_all_schedules_that_flush(subject: str) -> None:
    for schedule in FLUSHING:
        tried = Training(schedule, 2, subject=subject)
        assert_equal(expected_of(tried)[0], ask_oracle(tried))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_option_in_one_process(schedule: str) -> None:
    """The nightly run has the trainings that several processes train."""
    for training in COVERING:
        if training.schedule == schedule and training not in IN_PROCESSES:
            assert_runs(training, run_here(training))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_trainings_of_several_processes_in_one(schedule: str) -> None:
    for training in IN_PROCESSES:
        if training.schedule == schedule:
            assert_runs(training, run_here(training))


PINNED = {
    "two stages sum over the same replicas, of unequally many microbatches": Training(
        "v-half", 2, 3, "tied neighbours", (2, 2)
    ),
    "a save beside the training, whose forwards read another type": Training(
        "2bw", 2, precision="low versions", saves=3
    ),
    "a save while the scale of losses falls and grows": Training("2bw", 2, scales=True, saves=3),
    "one stage, whose backwards are whole": Training("zb-h1", 1, recompute="layers"),
}
"""Faults that were found, and pairs that the table does not have."""


@pytest.mark.parametrize("name", PINNED)
def test_pinned_trainings(name: str) -> None:
    assert_runs(PINNED[name], run_here(PINNED[name]))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_subject_in_one_process(schedule: str) -> None:
    for training in SUBJECTS:
        if training.schedule == schedule:
            assert_runs(training, run_here(training))


def assert_processes(pool: Pool, trainings: list[Training], processes: int, folder: str) -> None:
    """The runs of `trainings` that have as many `processes`. Together the ranks hold all tensors."""
    trainings = [training for training in trainings if training.processes == processes]
    outcomes = pool.run(processes, run_trainings, trainings, folder)
    for training, parts in zip(trainings, zip(*outcomes, strict=True), strict=True):
        evaluated = run_here(training)[0].evaluated if training.evaluates else None
        for part in parts:
            assert_runs(training, part)
            assert part[0].evaluated == evaluated
        assert expected_of(training)[0].state.keys() == {name for part in parts for name in part[0].state}


@pytest.mark.parametrize("processes", [2, 3, 4, 5])
def test_several_processes(pool: Pool, processes: int, tmp_path: Any) -> None:
    """Every value, and every schedule, is met."""
    assert_processes(pool, IN_PROCESSES, processes, str(tmp_path))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("processes", [2, 3, 4, 5])
def test_all_trainings_in_several_processes(pool: Pool, processes: int, tmp_path: Any) -> None:
    assert_processes(pool, [each for each in COVERING if each not in IN_PROCESSES], processes, str(tmp_path))


@pytest.mark.hypothesis
@settings(max_examples=12)
@given(drawn_trainings())
def test_any_training_in_one_process(training: Training) -> None:
    assert_runs(training, run_here(training))


def test_any_training_of_replicas_that_share_state(pool: Pool, tmp_path: Any) -> None:
    """In as many processes as it has ranks: in one there is nothing to share."""
    draws = Random(5)
    trainings = [draw_sharing(draws.choice) for _ in range(300 if os.environ.get("PENSTOCK_DRAWS") == "fuzz" else 4)]
    for number, training in enumerate(trainings):
        outcomes = pool.run(training.processes, run_trainings, [training], str(tmp_path / str(number)))
        for found in outcomes:
            assert_runs(training, found[0])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("number", range(300))
def test_any_training_of_streamed_stages(number: int) -> None:
    training = draw_streamed(Random(f"streamed {number}"), 1)
    assert_runs(training, run_here(training))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("number", range(40))
def test_any_training_of_streamed_stages_in_processes(pool: Pool, processes: int, number: int, tmp_path: Any) -> None:
    training = draw_streamed(Random(f"streamed {number}"), processes)
    assert_processes(pool, [training], processes, str(tmp_path))


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "recompute": (IN_PARTS, "hardly hold less than recompute=True"),
    "subject": (AT_ONCE, "the copies would drift apart"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_table_leaves_out_is_refused(name: str) -> None:
    schedules, said = REFUSED[name]
    value, found = next(item for item in CHOICES[name].items() if item[1])
    assert tuple(found) == schedules
    for schedule in schedules:
        training = Training(schedule, **{name: value})
        with pytest.raises(penstock.PlanError, match=said):
            run_here(training)


def test_options_change_what_is_computed() -> None:
    """An option that is not handed on would equal an oracle that does not have it either."""
    plain = ask_oracle(Training("2bw", 3))
    for name in ("clips", "scales", "weighs", "rate", "hooks", "precision", "wire", "drains", "optimizer"):
        for value in islice(CHOICES[name], 1, None):
            assert ask_oracle(Training("2bw", 3, **{name: value})).losses[:4] != plain.losses, (name, value)
