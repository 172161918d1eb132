"""Profiles of layers that tensor-parallel processes share, and the plans that are made from them."""

import torch

from support.jobs.spread_jobs import (
    BLOCKS,
    WIDTH,
    measure_spread_layers,
    train_alone,
    train_with_the_chosen_plan,
)
from support.processes import Pool

NUMBER = 8
"""Bytes of a number of type float64."""


def test_a_process_holds_its_part_of_every_layer(pool: Pool) -> None:
    """The inner dimension is halved, in the weights of both products and in the first bias."""
    halved, kept = 2 * 4 * WIDTH * WIDTH + 4 * WIDTH, 3 * WIDTH
    for shared, single in pool.run(2, measure_spread_layers):
        assert (shared.tensor_parallel, single.tensor_parallel) == (2, 1)
        assert len(shared.layers) == len(single.layers) == BLOCKS
        for part, whole in zip(shared.layers, single.layers, strict=True):
            assert part.name == whole.name
            assert part.forward_seconds > 0
            assert part.backward_seconds > 0
            assert whole.parameter_bytes == NUMBER * (halved + kept)
            assert part.parameter_bytes == NUMBER * (halved / 2 + kept)
            assert part.cut_bytes == whole.cut_bytes
            # The activations of the inner dimension are halved as well.
            assert part.saved_bytes < whole.saved_bytes
            assert part.workspace_bytes < whole.workspace_bytes


def test_a_plan_of_both_profiles_trains_with_tensor_parallelism(pool: Pool) -> None:
    """A block needs 69 kB, of which a quarter are weights: a device holds less than two, or half of three."""
    outcomes = pool.run(2, train_with_the_chosen_plan, 132e3, 3)
    losses, state = train_alone(3)

    for chosen, found, weights in outcomes:
        assert chosen.tensor_parallel == 2
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
        for name, tensor in state.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-10, atol=1e-12)
