"""Profiles that are scaled to what layers take together."""

import pytest
import torch
from torch import nn

import penstock
from penstock.profiling.training_loops import as_in_training, measure_rounds


def test_a_chain_runs_together_and_stays_as_it_was():
    """The ratios of the layers stay; weights, gradients, buffers and generators do, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    sample = (torch.randn(4, 8),)
    chain = penstock.capture(model, sample)
    measured = penstock.profile(chain, sample, iterations=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    found = as_in_training(measured, [measure_rounds(measured, chain, sample, torch.bfloat16)])

    factor = found.seconds / measured.seconds
    assert factor > 0
    for one, other in zip(found.layers, measured.layers, strict=True):
        assert abs(one.forward_seconds - factor * other.forward_seconds) <= 1e-9 * found.seconds
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_slowest_process_of_each_round_counts():
    """Each process is compared with its own mean; a round that was held up counts as one and a half medians."""
    measured = penstock.profile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), (torch.randn(4, 8),), iterations=2)

    def seconds(*rounds: list[float]) -> float:
        return as_in_training(measured, rounds).seconds

    assert seconds([2.0, 2.0], [5.0, 5.0]) == pytest.approx(2.0)
    assert seconds([1.0, 3.0]) == pytest.approx(2.0)
    # The first process takes 0.5 and 1.5 of its mean, the second one 1.2 and 0.8.
    assert seconds([1.0, 3.0], [6.0, 4.0, 5.0]) == pytest.approx(2.0 * (1.2 + 1.5) / 2)
    assert seconds([2.0, 2.0, 2.0, 100.0]) == pytest.approx((2.0 + 2.0 + 2.0 + 3.0) / 4)
    assert as_in_training(measured, [[], []]) == measured
