"""Causal language models in a pipeline: perplexity, and greedy text, with the numbers of the whole model.

The inputs of a model have the names that Hugging Face gives them: ``input_ids``, ``attention_mask``, ``labels``. Every
process calls these functions with the same arguments, and gets the same result.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.pipeline import Pipeline
from penstock.training.losses import Microbatches


def perplexity(pipe: Pipeline, batches: Iterable[Any]) -> float:
    """The exponential of the mean loss over all tokens of `batches` that count, in evaluation mode.

    The batches are as those of ``pipe.step``, of any lengths and padded with labels of -100. Raises `PenstockError`
    unless the pipeline has ``loss_fn=model_loss`` and a ``loss_weight`` such as `token_count`, and if no token counts.
    """
    recipe, total, tokens = pipe._options.recipe, 0.0, 0.0
    if recipe.loss_weight is None or not recipe.reads_model_loss:
        raise PenstockError(
            "perplexity(pipe=): expected loss_fn=penstock.model_loss and loss_weight=penstock.token_count('labels', "
            "shifted=True), found other ones: build the pipeline with them"
        )
    for batch in batches:
        parts = batch.inputs if isinstance(batch, Microbatches) else [batch]
        amount = sum(float(recipe.loss_weight(part)) for part in parts)
        total += float(pipe.evaluate(batch).loss) * amount
        tokens += amount
    if not tokens:
        raise PenstockError("perplexity(batches=): expected labels that count, found none: pass batches with labels")
    return math.exp(total / tokens)


def generate(
    pipe: Pipeline, prompts: Mapping[str, Tensor], *, new_tokens: int, end: int | None = None, bucket: int = 64
) -> Tensor:
    """The most likely next tokens of each prompt, (prompts, `new_tokens`): those of the model itself.

    `prompts`: ``input_ids``, and where the pipeline's sample has one, ``attention_mask``, which ends with the zeros of
    the padding. A row that has reached the token `end` is filled with it. Each token takes a forward of all text so
    far, filled up to a multiple of `bucket` tokens; there is no cache of keys and values. The model must be causal, so
    that what is behind a token does not change its output. Raises `PenstockError` for padding on the left.
    """
    ids = prompts["input_ids"]
    mask = prompts.get("attention_mask", torch.ones_like(ids)).bool()
    if bool((mask[:, 1:] > mask[:, :-1]).any() | ~mask[:, 0].all()):
        raise PenstockError(
            "generate(prompts=): expected prompts that begin at the first position, with the padding behind them, "
            "found padding before a token: use padding_side='right'"
        )
    lengths, rows = mask.sum(1), torch.arange(len(ids), device=ids.device)
    longest = -(-(ids.size(1) + new_tokens) // bucket) * bucket
    words = ids.new_zeros(len(ids), longest)
    words[:, : ids.size(1)] = ids * mask
    made = ids.new_full((len(ids), new_tokens), 0 if end is None else end)
    going = torch.ones_like(rows, dtype=torch.bool)
    for place in range(new_tokens):
        width = -(-int(lengths.max()) // bucket) * bucket
        batch = {"input_ids": words[:, :width]}
        if "attention_mask" in prompts:
            known = torch.arange(width, device=ids.device) < lengths[:, None]
            batch["attention_mask"] = known.to(prompts["attention_mask"].dtype)
        if pipe._options.recipe.reads_model_loss:
            batch["labels"] = batch["input_ids"]
        output = pipe.predict(batch)
        logits = (output if isinstance(output, Tensor) else output["logits"]).to(ids.device)
        found = logits[rows, lengths - 1].argmax(-1)
        if end is not None:
            found = torch.where(going, found, end)
            going &= found != end
        made[:, place] = words[rows, lengths] = found
        lengths = lengths + 1
        if not going.any():
            break
    return made
