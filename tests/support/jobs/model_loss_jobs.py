"""Training on losses that the models compute themselves, and on microbatches of different lengths: in the test's
process, and in those of the pool.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import penstock
from support import models
from support.jobs import loss_weight_jobs
from support.jobs.transformer_jobs import SUBJECTS
from support.training import Outcome
from support.training import train as train_on_pairs

VOCABULARY = 50
IGNORED = -100


def build() -> Any:
    """A Llama of two blocks."""
    return SUBJECTS["llama-padded"].build()


def labelled(samples: int, length: int, seed: int, lengths: Tensor | None = None) -> dict[str, Tensor]:
    """Padded sentences with their labels; the first words of each are a prompt, which is not learned."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(VOCABULARY, (samples, length), generator=generator)
    if lengths is None:
        lengths = torch.randint(4, length + 1, (samples,), generator=generator)
    position = torch.arange(length)
    prompts = torch.randint(0, 3, (samples, 1), generator=generator)
    mask = position < lengths[:, None]
    labels = words.masked_fill(~mask | (position < prompts), IGNORED)
    return {"input_ids": words, "attention_mask": mask.long(), "labels": labels}


SENTENCES = [labelled(7, 8, seed) for seed in range(3)]
"""Batches of a step, padded to one length."""
PADDED = [
    penstock.Microbatches([labelled(3, 5, seed), labelled(2, 9, seed + 10), labelled(2, 7, seed + 20)])
    for seed in range(3)
]
"""Batches whose microbatches are padded each to its own length."""


def labelled_options(schedule: str, **more: Any) -> dict[str, Any]:
    """Arguments of the pipeline and of the oracle."""
    return {
        "sample": labelled(2, 8, 99),
        "loss_fn": penstock.model_loss,
        "loss_weight": penstock.token_count("labels", shifted=True),
        "optimizer": models.momentum,
        "schedule": schedule,
        "stages": 2,
        "microbatches": 3,
        **more,
    }


BATCHES = [
    penstock.Microbatches(*zip(*((x[:size, :length], y[:size, :length]) for size, length in shapes), strict=True))
    for (x, y), shapes in zip(
        loss_weight_jobs.BATCHES, [((4, 3), (2, 6), (4, 4)), ((4, 6), (4, 5), (4, 2))], strict=False
    )
]
"""Microbatches of different lengths with targets."""


def ragged_options(schedule: str, **more: Any) -> dict[str, Any]:
    """Arguments of the pipeline and of the oracle."""
    return loss_weight_jobs.weighted_options(schedule, 3, 3, **more)


def train(make: Callable[[], Any], batches: list[Any], options: dict[str, Any]) -> Outcome:
    """The run by `Pipeline`, with an evaluation of the first batch."""
    pipe = penstock.Pipeline(make(), **options)
    return train_on_pairs(pipe, [(batch, None) for batch in batches], evaluates=True)


def run_labelled(schedule: str, padded: bool) -> Outcome:
    """A Llama with labels, whose microbatches have one length or lengths of their own."""
    return train(build, PADDED if padded else SENTENCES, labelled_options(schedule))


def refuse_uneven_labels() -> str:
    """The error that a process meets if nothing weighs microbatches with other numbers of labels."""
    pipe = penstock.Pipeline(build(), **labelled_options("1f1b-flush", loss_weight=None, timeout_seconds=60.0))
    try:
        pipe.step(SENTENCES[0])
        pipe.drain()
    except penstock.PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_ragged(schedule: str) -> Outcome:
    """A model without labels, whose microbatches have different lengths."""
    return train(loss_weight_jobs.build, BATCHES, ragged_options(schedule))
