"""A Trainer that trains through a pipeline: its logs are those of a plain one, and it resumes, saves and refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import penstock
from support.jobs import trainer_jobs
from support.jobs.trainer_jobs import History, arguments, collate, make_model, make_trainer, rows, train
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
    found = pool.run(2, trainer_jobs.train_and_resume, tmp_path / "pipeline")
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
    given: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 3}
    given |= {"bf16": True, "eval_strategy": "no", "save_strategy": "no"}
    expected = train(tmp_path, plain=True, given=given)

    # To the type's rounding, if sums are taken in another order.
    assert_alike(expected, train(tmp_path, given=given, stages=2), rounding=1e-2)


def unfollowed(name: str, value: Any) -> Callable[[Path], Any]:
    return lambda folder: penstock.integrations.PipelineTrainer(make_model(), arguments(folder, **{name: value}))


def with_a_forward_of_its_own(folder: Path) -> Any:
    model = make_model()
    model.forward = model.forward
    return penstock.integrations.PipelineTrainer(model, arguments(folder))


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "options that the trainer passes": (
        lambda folder: make_trainer(folder, optimizer=None, sample=1).train(),
        "has optimizer, sample, which the Trainer passes itself",
    ),
    "a loss": (
        lambda folder: make_trainer(folder, loss_fn=None).train(),
        "has loss_fn, which the Trainer passes itself",
    ),
    "a plan with other microbatches": (
        lambda folder: make_trainer(folder, plan=penstock.Plan.uniform(4, 2, microbatches=4)).train(),
        r"has 4 microbatches, .* gradient_accumulation_steps=3",
    ),
    "an epoch that ends with too few samples, at once": (
        lambda folder: make_trainer(folder, samples=26, stages=2).train(),
        "26 samples, so that the last step of an epoch has 2 for 3",
    ),
    "a forward that closes over its model": (with_a_forward_of_its_own, r"as trainers of TRL do.*copy\.deepcopy"),
    "a pipeline before the first batch": (
        lambda folder: make_trainer(folder, stages=2).pipeline,
        r"call train\(\) or evaluate\(\) first",
    ),
    **{
        f"what a pipeline cannot follow: {name}": (unfollowed(name, value), f"{name}.*{remedy}")
        for name, value, remedy in (
            ("label_smoothing_factor", 0.1, "let the model compute its loss"),
            ("activation_checkpointing", True, "'recompute': True"),
            ("torch_compile", True, "'compile': True"),
        )
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    call, text = REFUSED[case]
    with pytest.raises(penstock.PenstockError, match=text):
        call(tmp_path)
