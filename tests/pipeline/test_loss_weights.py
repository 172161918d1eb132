"""Means over tokens: a minibatch of ragged microbatches has the loss and the gradient of the whole batch."""

from typing import Any

import pytest

import penstock
from support import models
from support.jobs.loss_weight_jobs import (
    BATCHES,
    build,
    loss_fn,
    replicated,
    run_replicated,
    run_weighted,
    tokens,
    weighted_options,
)
from support.processes import Pool
from support.training import assert_equal, train_by_oracle

SCHEDULES = ("gpipe", "1f1b-flush", "pipedream", "2bw")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [3, 5, 6])
def test_weighted_losses_equal_the_oracle(schedule: str, microbatches: int) -> None:
    options = weighted_options(schedule, 3, microbatches)

    assert_equal(train_by_oracle(build(), BATCHES, **options), run_weighted(**options))


@pytest.mark.parametrize("schedule", ["1f1b-flush", "pipedream", "2bw"])
@pytest.mark.parametrize("split", [False, True])
def test_replicas_weigh_what_they_have(schedule: str, split: bool) -> None:
    options = replicated(schedule, split)

    assert_equal(train_by_oracle(build(), BATCHES, **options), run_weighted(**options))


def test_in_several_processes(pool: Pool) -> None:
    expected = run_replicated("2bw", True)
    for outcome in pool.run(3, run_replicated, "2bw", True):
        assert_equal(expected, outcome)
        assert outcome.evaluated == expected.evaluated


@pytest.mark.parametrize("microbatches", [3, 6])
def test_the_numbers_are_those_of_the_whole_batch(microbatches: int) -> None:
    model = build()
    optimizer = models.momentum(list(model.parameters()))
    losses = []
    for x, y in BATCHES:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = run_weighted(**weighted_options("1f1b-flush", 3, microbatches))
    unweighted = run_weighted(**{**weighted_options("1f1b-flush", 3, microbatches), "loss_weight": None})

    # To rounding, since a batch in parts is summed in another order.
    assert found.losses == pytest.approx(losses, rel=1e-12)
    assert unweighted.losses != pytest.approx(losses, rel=1e-3)
    assert found.evaluated == pytest.approx(float(loss_fn(model(BATCHES[0][0]), BATCHES[0][1]).detach()), rel=1e-12)


@pytest.mark.parametrize(
    ("weigh", "said"),
    [
        (lambda y: -1, "expected one number of at least 0"),
        (lambda y: y, "expected one number of at least 0"),
        (lambda y: float("nan"), "expected one number of at least 0"),
        (lambda y: 0, "is 0 for every microbatch"),
    ],
)
def test_a_wrong_weight_is_explained(weigh: Any, said: str) -> None:
    pipe = penstock.Pipeline(build(), **{**weighted_options("gpipe", 2, 3), "loss_weight": weigh})
    with pytest.raises(penstock.PenstockError, match=said):
        pipe.step(*BATCHES[0])
    assert tokens(BATCHES[0][1]) > 0
