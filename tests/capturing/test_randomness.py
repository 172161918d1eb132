"""Dropout in PyTorch's own stream, for those who want no other."""

import pytest
import torch

import penstock
from support.training import Case, run_pipeline, train_by_loop


@pytest.mark.parametrize("recompute", [None, True, "layers"])
def test_without_a_seed_dropout_goes_on_in_the_stream_of_pytorch(recompute: object) -> None:
    """In one stage a schedule that flushes draws in the order of a plain loop."""
    case = Case("normalized", "1f1b-flush", 1, 4)
    torch.manual_seed(5)
    pipe = penstock.Pipeline(case.build(), **{**case.options, "seed": None, "recompute": recompute})
    torch.manual_seed(5)
    losses = [float(pipe.step(x, y).loss) for x, y in case.batches]

    model, options = case.build(), case.options
    torch.manual_seed(5)
    expected = train_by_loop(model, case.batches, options["loss_fn"], options["optimizer"], 4).losses

    assert tuple(losses) == expected
    assert losses != list(run_pipeline(case).losses)


def test_a_checkpoint_keeps_that_there_is_no_seed(tmp_path: object) -> None:
    case = Case("normalized", "gpipe", 2, 4)
    pipe = penstock.Pipeline(case.build(), **{**case.options, "seed": None})
    pipe.step(*case.batches[0])
    pipe.save(f"{tmp_path}/state")
    other = penstock.Pipeline(case.build(), **case.options)
    other.load(f"{tmp_path}/state")

    assert other.state_dict()["pipeline"]["seed"] is None
