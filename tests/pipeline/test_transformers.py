"""The models that users bring train unchanged in stages, with the numbers of the oracle and of the plain loop."""

import pytest
import torch
import transformers
from torch import Tensor

from support.jobs.transformer_jobs import (
    SUBJECTS,
    Run,
    loss_fn,
    make_pipeline,
    run_in_pipeline,
    run_plainly,
    run_reference,
    run_these,
)
from support.processes import Pool
from support.training import Outcome, assert_equal, assert_ranks_equal

TIED = ("GPT2LMHeadModel", "T5ForConditionalGeneration", "BertForMaskedLM")
"""Their first and last stages share weights, which `pipedream` refuses. The adapted GPT-2 does not train those."""
UNTIED = (
    "LlamaForCausalLM",
    "ViTForImageClassification",
    "ResNetForImageClassification",
    "UNet",
    "Recurrent",
    "PeftModel",
)
SPLIT = ("T5ForConditionalGeneration", "LlamaForCausalLM", "Recurrent", "PeftModel")
"""Whose backwards are done in two parts, too."""


def runs_of(subject: str) -> list[Run]:
    """On three ranks, under each kind of schedule that is allowed. Models take turns with the schedules of a kind."""
    odd = [*TIED, *UNTIED].index(subject) % 2
    flushing = (Run(subject, "1f1b-flush", 3, microbatches=3), Run(subject, "interleaved", 6, 2, microbatches=3))
    delayed = Run(subject, "pipedream" if odd and subject not in TIED else "2bw", 3, microbatches=3)
    split = [Run(subject, "zb-v", 6, 2, microbatches=3)] if subject in SPLIT else []
    return [delayed, flushing[odd], *split] if odd else [flushing[odd], delayed, *split]


def promised(run: Run) -> Outcome:
    """What the oracle says of a run.

    The numbers depend on the stages under `pipedream`, and where three layers share a weight: each stage sums its own
    uses.
    """
    if run.schedule == "pipedream" or run.subject == "T5ForConditionalGeneration":
        return run_reference(run)
    return run_reference(Run(run.subject, "2bw" if run.schedule == "2bw" else "1f1b-flush", 3, microbatches=3))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("subject", [*TIED, *UNTIED])
def test_every_model_under_every_kind_of_schedule(pool: Pool, subject: str) -> None:
    """Half of the runs in one process, half in three."""
    runs = runs_of(subject)
    for run in runs[1::2]:
        expected, actual = promised(run), run_in_pipeline(run)

        assert_equal(expected, actual)
        assert set(expected.state) == set(actual.state)
    assert_ranks_equal(pool.run(3, run_these, runs[::2]), [promised(run) for run in runs[::2]])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("subject", ["gpt2", "llama", "llama-grouped", "bert", "vit"])
def test_the_flush_equals_the_unsplit_model(subject: str) -> None:
    plain, split = run_plainly(subject), run_in_pipeline(Run(subject, "1f1b-flush", 3))

    assert set(plain.state) == set(split.state)
    assert_equal(plain, split)


def test_only_the_small_matrices_of_a_lora_are_trained() -> None:
    start, end = (
        SUBJECTS["PeftModel"].build().state_dict(),
        run_reference(Run("PeftModel", "1f1b-flush", 2, microbatches=3)),
    )
    moved = {name for name, tensor in end.state.items() if not torch.equal(tensor, start[name])}

    assert moved
    assert all("lora_" in name for name in moved)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("subject", ["gpt2", "llama-padded", "bert", "t5", "Recurrent"])
def test_a_prediction_is_the_model_s_own_output_for_sentences_of_any_length(subject: str) -> None:
    pipe, whole = make_pipeline(Run(subject, "1f1b-flush", 2)), SUBJECTS[subject].build().eval()
    for length in (4, 8, 13):
        inputs = SUBJECTS[subject].inputs(2, length)
        with torch.no_grad():
            expected = whole(**inputs)
        # As a tokenizer returns it: a mapping, and no dict.
        found = pipe.predict(transformers.BatchEncoding(inputs))

        assert type(found) is type(expected)
        if isinstance(found, Tensor):
            assert torch.equal(expected, found)
            continue
        assert found.loss is None
        for name, tensor in expected.items():
            assert not isinstance(tensor, Tensor) or torch.equal(tensor, found[name]), name


def test_sentences_of_other_lengths_train() -> None:
    subject = "llama-padded"
    batches = [(SUBJECTS[subject].inputs(9, length), torch.zeros(9, length, dtype=torch.long)) for length in (13, 4)]
    plain, pipe = SUBJECTS[subject].build(), make_pipeline(Run(subject, "1f1b-flush", 2))
    with torch.no_grad():
        expected = loss_fn(plain(**batches[0][0]), batches[0][1]).item()

    # One mean over nine samples in place of four over a few each.
    assert float(pipe.step(*batches[0]).loss) == pytest.approx(expected, rel=1e-12)
    assert float(pipe.step(*batches[1]).loss) < expected


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
