"""Microbatches that the user has cut, each with a length and a number of samples of its own."""

from typing import Any

import pytest
import torch

import penstock
from support.jobs import loss_weight_jobs
from support.jobs.model_loss_jobs import (
    BATCHES,
    PADDED,
    build,
    labelled_options,
    ragged_options,
    run_labelled,
    run_ragged,
    train,
)
from support.processes import Pool
from support.training import Outcome, assert_equal


def oracle(model: Any, batches: Any, options: dict[str, Any]) -> Outcome:
    found = penstock.reference_train(model, [(batch, None) for batch in batches], **options)
    return Outcome(found.losses, found.state)


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw", "pipedream", "zb-h1"])
def test_lengths_that_differ_equal_the_oracle(schedule: str) -> None:
    options = ragged_options(schedule)

    assert_equal(oracle(loss_weight_jobs.build(), BATCHES, options), run_ragged(schedule))


def test_in_three_processes(pool: Pool) -> None:
    expected = run_ragged("1f1b-flush")
    for outcome in pool.run(3, run_ragged, "1f1b-flush"):
        assert_equal(expected, outcome)
        assert outcome.evaluated == expected.evaluated


def test_sentences_with_labels_in_two_processes(pool: Pool) -> None:
    expected = oracle(build(), PADDED, labelled_options("1f1b-flush"))
    for outcome in pool.run(2, run_labelled, "1f1b-flush", True):
        assert_equal(expected, outcome)


def test_the_padding_of_one_batch_changes_nothing() -> None:
    """The same sentences, padded to one length and to a length of each microbatch."""
    microbatches = PADDED[0].inputs
    longest = max(batch["input_ids"].shape[1] for batch in microbatches)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}

    def padded(batch: dict[str, Any]) -> dict[str, Any]:
        return {
            name: torch.nn.functional.pad(tensor, (0, longest - tensor.shape[1]), value=fill[name])
            for name, tensor in batch.items()
        }

    whole = {name: torch.cat([padded(batch)[name] for batch in microbatches]) for name in fill}
    options = labelled_options("1f1b-flush")
    ragged, even = (train(build, [batch], options) for batch in (PADDED[0], whole))

    # Losses in float32, and sums in another order.
    assert ragged.losses == pytest.approx(even.losses, rel=1e-5)
    torch.testing.assert_close(ragged.state, even.state, rtol=1e-4, atol=1e-6)


def refused(microbatches: penstock.Microbatches, target: Any = None, **options: Any) -> str:
    pipe = penstock.Pipeline(loss_weight_jobs.build(), **{**ragged_options("1f1b-flush"), **options})
    with pytest.raises(penstock.PenstockError) as error:
        pipe.step(microbatches, target)
    return str(error.value)


def test_lengths_that_differ_need_a_weight() -> None:
    assert "pass loss_weight=lambda target: (target != -100).sum()" in refused(BATCHES[0], loss_weight=None)
    pipe = penstock.Pipeline(build(), **labelled_options("1f1b-flush", loss_weight=None))
    with pytest.raises(penstock.PenstockError, match=r"pass loss_weight=penstock\.token_count"):
        pipe.step(PADDED[0])


def test_other_numbers_of_microbatches_are_refused() -> None:
    inputs, targets = BATCHES[0]
    assert targets is not None

    assert "holds 2 microbatch(es) and a step has 3" in refused(penstock.Microbatches(inputs[:2], targets[:2]))
    assert "3 inputs and 2 targets" in refused(penstock.Microbatches(inputs, targets[:2]))
    assert "a target beside it" in refused(BATCHES[0], targets[0])


def test_a_prediction_takes_one_batch() -> None:
    pipe = penstock.Pipeline(loss_weight_jobs.build(), **ragged_options("1f1b-flush"))
    with pytest.raises(penstock.PenstockError, match="predict takes one batch"):
        pipe.predict(BATCHES[0])


def test_prefetching_keeps_the_microbatches() -> None:
    (found,) = penstock.prefetch([BATCHES[0]], "cpu")

    assert isinstance(found, penstock.Microbatches)
    assert [x.shape for x in found.inputs] == [x.shape for x in BATCHES[0].inputs]
    assert all(x.is_meta for x in penstock.shapes_of(BATCHES[0]).inputs)
