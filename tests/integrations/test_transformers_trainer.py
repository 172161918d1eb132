"""A Trainer that trains through a pipeline: its logs are those of a plain one, and it resumes, saves and refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import penstock
from support.jobs.trainer_jobs import (
    History,
    arguments,
    collate,
    make_model,
    make_trainer,
    rows,
    train,
    train_and_resume,
)
from support.processes import Pool

pytest.importorskip("accelerate")

FLOAT32 = 1e-4
"""The models are in float32, and sums over a step's microbatches are taken in another order."""


def assert_alike(expected: History, found: History, rounding: float = FLOAT32) -> None:
    assert [sorted(logs) for logs in found] == [sorted(logs) for logs in expected]
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=rounding)


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_the_logs_of_a_plain_trainer(pool: Pool, tmp_path: Path) -> None:
    """Losses, gradient norms, learning rates, accuracies: in two processes, and resumed."""
    expected = train(tmp_path / "plain", plain=True)
    found = pool.run(2, train_and_resume, tmp_path / "pipeline")
    evaluations = [logs["eval_loss"] for logs in expected if "eval_loss" in logs]

    assert len([logs for logs in expected if "loss" in logs]) == 10
    assert evaluations[-1] < expected[0]["loss"]
    for whole, resumed, best in found:
        assert_alike(expected, whole)
        assert resumed == whole == found[0][0]
        assert best == pytest.approx(min(evaluations), rel=FLOAT32)

    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pipeline" / "checkpoint-10").eval()
    batches = [collate(rows(9)[start : start + 4]) for start in (0, 4, 8)]
    with torch.no_grad():
        # The Trainer weighs batches by their samples.
        losses = [float(saved(**batch).loss) * len(batch["labels"]) / 9 for batch in batches]

    assert sum(losses) == pytest.approx(evaluations[-1], rel=FLOAT32)


def test_an_evaluation_before_the_training(tmp_path: Path) -> None:
    plain, piped = make_trainer(tmp_path, plain=True), make_trainer(tmp_path, stages=2)

    assert piped.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=FLOAT32)
    assert piped.pipeline.schedule.stages == 2


def test_low_precision_and_steps_of_one_sample(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "bf16": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
    }
    given = {**given, "eval_strategy": "no", "save_strategy": "no"}
    expected = train(tmp_path, plain=True, given=given)

    # To the type's rounding, if sums are taken in another order.
    assert_alike(expected, train(tmp_path, given=given, stages=2), rounding=1e-2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": None, "sample": 1}, "has optimizer, sample, which the Trainer passes itself"),
        ({"loss_fn": None}, "has loss_fn, which the Trainer passes itself"),
    ],
)
def test_options_that_the_trainer_passes_are_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(penstock.PenstockError) as caught:
        make_trainer(tmp_path, **options).train()
    assert text in str(caught.value)


def test_a_plan_with_other_microbatches_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, plan=penstock.Plan.uniform(4, 2, microbatches=4))
    with pytest.raises(penstock.PenstockError, match=r"has 4 microbatches, .* gradient_accumulation_steps=3"):
        trainer.train()


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"label_smoothing_factor": 0.1}, "let the model compute its loss"),
        ({"activation_checkpointing": True}, "'recompute': True"),
        ({"torch_compile": True}, "'compile': True"),
    ],
)
def test_what_a_pipeline_cannot_follow_is_refused(given: dict[str, Any], remedy: str, tmp_path: Path) -> None:
    from penstock.integrations import PipelineTrainer

    with pytest.raises(penstock.PenstockError, match=f"{next(iter(given))}.*{remedy}"):
        PipelineTrainer(make_model(), arguments(tmp_path, **given))


def test_an_epoch_that_ends_with_too_few_samples_is_refused_at_once(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, samples=26, stages=2)
    with pytest.raises(penstock.PenstockError, match="26 samples, so that the last step of an epoch has 2 for 3"):
        trainer.train()


def test_the_pipeline_is_built_from_the_first_batch(tmp_path: Path) -> None:
    with pytest.raises(penstock.PenstockError, match=r"call train\(\) or evaluate\(\) first"):
        _ = make_trainer(tmp_path, stages=2).pipeline
