"""Profiles that are scaled to what layers take together."""

import torch
from torch import nn

import penstock
from penstock.profiling.training_loops import as_in_training


def test_a_chain_runs_together_and_stays_as_it_was():
    """The ratios of the layers stay; weights, gradients, buffers and generators do, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    sample = (torch.randn(4, 8),)
    chain = penstock.capture(model, sample)
    measured = penstock.profile(chain, sample, iterations=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    found = as_in_training(measured, chain, sample, torch.bfloat16)

    factor = found.seconds / measured.seconds
    assert factor > 0
    for one, other in zip(found.layers, measured.layers, strict=True):
        assert abs(one.forward_seconds - factor * other.forward_seconds) <= 1e-9 * found.seconds
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.random.get_rng_state())
