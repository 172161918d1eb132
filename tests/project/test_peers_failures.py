"""What breaks in torch.distributed.pipelining does not break here; each test is a pain of its users.

Held elsewhere:

- tied embeddings, of which each stage keeps its own part of the gradient: runtime/test_tied.py
- checkpoints in which every rank writes the key ``0.weight``: runtime/test_pipeline.py (saved by three
  processes, loaded by two and by one)
- a loss on the last rank only: runtime/test_pipeline.py
- evaluation without a target: `predict` in runtime/test_pipeline.py
- Llama and others that cannot be traced: test_capturing_transformers.py, runtime/test_transformers.py
- skip connections: runtime/test_equality.py ("skipping"), runtime/test_transformers.py ("UNet")
- clipping by the norm of one stage: runtime/test_clipping.py
- a caught exception that leaves the peer hanging, a dead process whose cause stands in its own log only, a frozen
  process that hangs the others: runtime/test_failures.py
"""

from functools import cache
from typing import Any

import pytest
import torch

from support.jobs.input_jobs import BLOCKS, PLAIN, POSITIONS, WAYS, build, draw, train_and_look
from support.processes import Pool

FIRST, LARGER, SHORTER = (6, 5), (11, 9), (4, 3)
STEPS = (FIRST, LARGER, SHORTER)


@cache
def trained_in(pool: Pool) -> list[dict[str, Any]]:
    """What each of three ranks saw; the model returns a dict and takes one."""
    return pool.run(3, train_and_look, "one dict", "1f1b-flush", STEPS)


def plain_losses() -> list[float]:
    """The losses of a loop without a pipeline, in three microbatches."""
    model = build(PLAIN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for size in STEPS:
        tokens, mask, target = draw(*size)
        total = 0.0
        parts = zip(tokens.tensor_split(3), mask.tensor_split(3), target.tensor_split(3), strict=True)
        for part, part_mask, wanted in parts:
            share = len(part) / len(tokens)
            loss = PLAIN.loss_fn(model(part, part_mask, POSITIONS), wanted)
            (loss * share).backward()
            total += loss.item() * share
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def test_a_larger_batch_and_a_longer_sequence_than_the_first_train(pool: Pool) -> None:
    for seen in trained_in(pool):
        assert seen["losses"] == plain_losses()


def test_evaluation_with_a_smaller_batch_and_a_shorter_sequence_sees_no_stale_rows(pool: Pool) -> None:
    seen = trained_in(pool)
    model = build(PLAIN).eval()
    for when in ("before", "after"):
        if when == "after":
            model.load_state_dict({name: tensor for rank in seen for name, tensor in rank["state"].items()})
        for index, size in enumerate(((1, 4), (2, 3), (7, 9))):
            tokens, mask, target = draw(*size)
            whole = model(tokens, mask, POSITIONS)
            for rank in seen:
                loss, logits = rank[when][index]
                torch.testing.assert_close(logits, whole, rtol=0, atol=1e-12)
                assert loss == pytest.approx(PLAIN.loss_fn(whole, target).item(), rel=1e-12)


def test_there_is_no_forward_beside_those_of_the_training(pool: Pool) -> None:
    counts = [
        int(tensor)
        for rank in trained_in(pool)
        for name, tensor in rank["state"].items()
        if name.endswith("num_batches_tracked")
    ]

    # Of three minibatches three microbatches each; captures, evaluations and predictions count nothing.
    assert counts == [9] * BLOCKS


def test_names_in_the_ranks_states_are_the_models_own(pool: Pool) -> None:
    names = [set(rank["state"]) for rank in trained_in(pool)]

    assert sorted(name for some in names for name in some) == sorted(build(WAYS["one dict"]).state_dict())
