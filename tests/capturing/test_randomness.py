"""Streams of random layers, and dropout in PyTorch's own stream, for those who want no other."""

import pytest
import torch

import penstock
from penstock.capturing.randomness import part_seed, seeded
from support.training import Case, run_pipeline, train_by_loop


def test_a_random_layer_has_a_stream_of_its_own_and_gives_the_generator_back() -> None:
    before = torch.get_rng_state()
    drawn = []
    for layer in (2, 2, 3):
        with seeded(1, layer, ()):
            drawn.append(torch.rand(3))

    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_the_parts_of_a_microbatch_have_seeds_of_their_own() -> None:
    assert part_seed(5, 0) == 5
    assert len({part_seed(seed, part) for seed in (5, 6) for part in range(4)}) == 8


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
