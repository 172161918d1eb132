"""Jobs for the processes of the tests of scans: a recurrence whose time is cut over them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.scan import ScanGRU, ScanRNN

__all__ = ["STEPS", "build", "inputs_and_factors", "train_a_part"]

STEPS = 37


def build(kind: str, **options: Any) -> torch.nn.RNNBase:
    """Two layers whose gradients do not vanish."""
    torch.manual_seed(0)
    made: torch.nn.RNNBase = {"rnn": ScanRNN, "gru": ScanGRU}[kind](3, 6, num_layers=2, dtype=torch.float64, **options)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "weight_hh" in name:
                parameter.mul_(2.7 if kind == "rnn" else 6.0)
    return made


def inputs_and_factors() -> tuple[Tensor, Tensor, Tensor]:
    """All steps, the first states, and what every output counts in the loss."""
    torch.manual_seed(1)
    steps = torch.randn(STEPS, 2, 3, dtype=torch.float64) / 10
    return steps, torch.randn(2, 2, 6, dtype=torch.float64), torch.randn(STEPS, 2, 6, dtype=torch.float64)


def train_a_part(kind: str, method: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Outputs and gradients of this rank's steps, the gradient of the first states, and the summed gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layer = build(kind, method=method, group=dist.group.WORLD)
    steps, first, factors = inputs_and_factors()
    # Uneven parts.
    ends = [0, *(STEPS * (index + 1) // ranks for index in range(ranks))]
    own = steps[ends[rank] : ends[rank + 1]].clone().requires_grad_()
    first.requires_grad_()
    outputs, _ = layer(own, first)
    (outputs * factors[ends[rank] : ends[rank + 1]]).sum().backward()
    assert own.grad is not None and first.grad is not None
    gradients = {}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        gradients[name] = parameter.grad
    return outputs.detach(), own.grad, first.grad, gradients
