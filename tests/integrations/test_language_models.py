"""Perplexity and text of a causal language model in a pipeline are those of the model itself."""

import math

import pytest
import torch
from torch import Tensor

import penstock
from penstock.integrations import generate, perplexity
from pipeline.test_model_losses import FLOAT32, PADDED, SENTENCES, build, labelled_options
from support.processes import Pool

PROMPTS = {
    "input_ids": torch.tensor([[3, 7, 9, 0, 0], [5, 1, 4, 8, 2], [6, 0, 0, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]),
}
NEW = 6


def work() -> tuple[float, Tensor]:
    """Perplexity of batches that are padded in two ways, and the tokens after the prompts, in two buckets."""
    with penstock.Pipeline(build(), **labelled_options("1f1b-flush")) as pipe:
        return perplexity(pipe, [SENTENCES[0], PADDED[1]]), generate(pipe, PROMPTS, new_tokens=NEW, bucket=8)


def plainly() -> tuple[float, Tensor]:
    """The same of the whole model, each sentence by itself and without padding."""
    model, total, tokens = build().eval(), 0.0, 0
    with torch.no_grad():
        for batch in (SENTENCES[0], *PADDED[1].inputs):
            counted = int((batch["labels"][:, 1:] != -100).sum())
            total, tokens = total + model(**batch).loss.item() * counted, tokens + counted
    rows = []
    for ids, mask in zip(*PROMPTS.values(), strict=True):
        prompt = ids[mask.bool()][None]
        made = model.generate(prompt, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
        rows.append(made[0, prompt.size(1) :])
    return math.exp(total / tokens), torch.stack(rows)


@pytest.mark.processes
def test_the_numbers_are_those_of_the_model(pool: Pool) -> None:
    expected, text = plainly()
    for found, made in (work(), *pool.run(2, work)):
        assert found == pytest.approx(expected, rel=FLOAT32)
        assert torch.equal(made, text)


def test_text_ends_and_other_padding_is_refused() -> None:
    _, text = plainly()
    end = int(text[0, 2])
    left = {name: value.flip(1) for name, value in PROMPTS.items()}
    with penstock.Pipeline(build(), **labelled_options("1f1b-flush")) as pipe:
        made = generate(pipe, PROMPTS, new_tokens=NEW, end=end, bucket=8)
        with pytest.raises(penstock.PenstockError, match="padding_side='right'"):
            generate(pipe, left, new_tokens=NEW)
        with pytest.raises(penstock.PenstockError, match="labels that count, found none"):
            perplexity(pipe, [])

    for row, whole in zip(made.tolist(), text.tolist(), strict=True):
        stop = whole.index(end) if end in whole else NEW
        assert row == whole[:stop] + [end] * (NEW - stop)


def test_perplexity_needs_the_tokens_of_a_mean() -> None:
    pipe = penstock.Pipeline(build(), **labelled_options("1f1b-flush", loss_weight=None))
    with pipe, pytest.raises(penstock.PenstockError, match=r"loss_weight=penstock.token_count"):
        perplexity(pipe, [SENTENCES[0]])
