"""Models of Hugging Face train unchanged in stages, with the numbers of the oracle and of the plain loop."""

import pytest
import torch
import transformers
from torch import Tensor

from processes import Pool
from training import Outcome
from transformer_jobs import SUBJECTS, Run, make_pipeline, run_in_pipeline, run_plainly, run_reference, run_these


def promised(run: Run) -> Outcome:
    """What the oracle says of a run. Under `1f1b` alone the numbers depend on the stages, when no weight is shared."""
    if run.schedule == "1f1b":
        return run_reference(run)
    return run_reference(Run(run.subject, "2bw" if run.schedule == "2bw" else "1f1b-flush", 2))


def assert_equal(expected: Outcome, actual: Outcome) -> None:
    """Every loss and every tensor of `actual` is exactly the expected one."""
    assert expected.losses == actual.losses
    for name, tensor in actual.state.items():
        assert torch.equal(expected.state[name], tensor), name


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("subject", ["gpt2", "llama", "bert-dropout", "vit"])
def test_one_process(subject: str, stages: int) -> None:
    for schedule in ("1f1b-flush", "gpipe", "1f1b", "2bw"):
        run = Run(subject, schedule, stages)
        expected, actual = promised(run), run_in_pipeline(run)

        assert_equal(expected, actual)
        assert set(expected.state) == set(actual.state)


@pytest.mark.parametrize("subject", ["gpt2", "llama", "llama-grouped", "bert", "vit"])
def test_the_flush_equals_the_unsplit_model(subject: str) -> None:
    plain, split = run_plainly(subject), run_in_pipeline(Run(subject, "1f1b-flush", 3))

    assert set(plain.state) == set(split.state)
    assert_equal(plain, split)


@pytest.mark.parametrize("subject", ["gpt2", "llama"])
@pytest.mark.parametrize(("ranks", "schedules"), [(2, ("1f1b-flush", "2bw")), (3, ("gpipe", "1f1b"))])
def test_several_processes(pool: Pool, subject: str, ranks: int, schedules: tuple[str, ...]) -> None:
    runs = [Run(subject, schedule, ranks) for schedule in schedules]
    outcomes = pool.run(ranks, run_these, runs)
    for run, parts in zip(runs, zip(*outcomes, strict=True), strict=True):
        expected = promised(run)
        for part in parts:
            assert_equal(expected, part)

        assert set(expected.state) == {name for part in parts for name in part.state}


@pytest.mark.parametrize("subject", ["t5", "resnet"])
def test_models_with_more_than_one_value_across_a_cut_and_with_buffers(subject: str) -> None:
    run = Run(subject, "1f1b-flush", 2)

    assert_equal(run_reference(run), run_in_pipeline(run))


@pytest.mark.parametrize("subject", ["t5", "llama"])
def test_a_prediction_is_the_model_s_own_output(subject: str) -> None:
    pipe, whole = make_pipeline(Run(subject, "1f1b-flush", 2)), SUBJECTS[subject].build().eval()
    inputs = SUBJECTS[subject].inputs(2)
    with torch.no_grad():
        expected = whole(**inputs)
    # As a tokenizer returns it: a mapping, and no dict.
    found = pipe.predict(transformers.BatchEncoding(inputs))

    assert type(found) is type(expected)
    assert found.loss is None
    for name, tensor in expected.items():
        assert not isinstance(tensor, Tensor) or torch.equal(tensor, found[name]), name


def test_a_loss_that_the_model_computes() -> None:
    """With labels= the model's output has its loss; there is no target then."""
    (inputs, _), subject = SUBJECTS["gpt2"].batches[0], SUBJECTS["gpt2"]
    model = subject.build()
    expected = model(**inputs, labels=inputs["input_ids"]).loss.item()
    pipe = make_pipeline(
        Run("gpt2", "1f1b-flush", 2),
        sample={**subject.sample, "labels": subject.sample["input_ids"]},
        loss_fn=lambda output, target: output.loss,
        microbatches=3,
    )

    # The model computes its loss in float32; the mean of three microbatches' means is summed in another order.
    assert float(pipe.step({**inputs, "labels": inputs["input_ids"]}, None).loss) == pytest.approx(expected, rel=1e-6)
