"""Ranks that do different things, or are given different data, end at once, and each says what differs."""

from itertools import cycle

import pytest

from support.jobs.drift_jobs import APART, SCENARIOS, build_apart, drift, part_replicas
from support.processes import Pool

EXPECTED = {
    "skip_a_record": "with values of digest",
    "skip_the_first": "with values of digest",
    "step_once_more": "calls drain",
    "step_once_less": "calls drain",
    "take_parts": "penstock.loader(dataset, ...). A DistributedSampler",
    "shuffle_apart": "shuffle without a common seed",
    "swap_targets": "has target with values of digest",
    "take_other_sizes": "8 samples",
    "take_other_sizes_later": "8 samples",
    "split_parts_of_the_batch": "with values of digest",
    "evaluate_alone": "calls drain",
    "predict_instead": "calls predict",
    "state_of_one": "calls drain",
    "load_on_one": "microbatches of training, and rank",
    "refuse_on_one": "cannot be cut into 3 microbatches",
    "refuse_on_all": None,
}


SCHEDULES = ("1f1b-flush", "2bw", "pipedream")


def test_every_drift_is_named_on_every_rank(pool: Pool) -> None:
    cases = list(zip(SCENARIOS, cycle(SCHEDULES)))
    answers = pool.run(3, drift, cases)
    found = {case: errors for case, *errors in zip(cases, *answers, strict=True)}
    silent = {
        case: errors
        for case, errors in found.items()
        if not all((EXPECTED[case[0]] or "") in error and bool(error) == bool(EXPECTED[case[0]]) for error in errors)
    }

    assert silent == {}


def test_options_that_differ_are_named_on_every_rank(pool: Pool) -> None:
    for found in pool.run(2, build_apart):
        assert found.keys() == {*APART, "lr", "optimizer"}
        for option, error in found.items():
            assert f" {option}=" in error
            assert "rank 0" in error
            assert "rank 1" in error


@pytest.mark.parametrize("schedule", ["gpipe", "2bw"])
def test_replicas_whose_weights_differ_are_named(pool: Pool, schedule: str) -> None:
    for error in pool.run(2, part_replicas, schedule):
        assert "the replicas of stage 0 on ranks [0, 1] have different weights: blocks.0.0.weight" in error
