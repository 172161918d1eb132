"""A recurrence whose time is cut over processes equals the same one in one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.scan import ScanGRU, ScanLSTM, ScanRNN
from support.processes import Pool

STEPS = 37


def build(kind: str, **options: Any) -> torch.nn.RNNBase:
    """Two layers whose gradients do not vanish."""
    torch.manual_seed(0)
    made: torch.nn.RNNBase = {"rnn": ScanRNN, "gru": ScanGRU, "lstm": ScanLSTM}[kind](
        3, 6, num_layers=2, dtype=torch.float64, **options
    )
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


def states_of(kind: str, first: Tensor) -> Any:
    """An LSTM has other values in its cell."""
    return (first, first.tanh()) if kind == "lstm" else first


def train_a_part(kind: str, method: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Outputs and gradients of this rank's steps, the gradient of the first states, and the summed gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layer = build(kind, method=method, group=dist.group.WORLD)
    steps, first, factors = inputs_and_factors()
    # Uneven parts.
    ends = [0, *(STEPS * (index + 1) // ranks for index in range(ranks))]
    own = steps[ends[rank] : ends[rank + 1]].clone().requires_grad_()
    first.requires_grad_()
    outputs, _ = layer(own, states_of(kind, first))
    (outputs * factors[ends[rank] : ends[rank + 1]]).sum().backward()
    assert own.grad is not None and first.grad is not None
    gradients = {}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        gradients[name] = parameter.grad
    return outputs.detach(), own.grad, first.grad, gradients


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "method"), [("rnn", "blelloch"), ("gru", "chunked"), ("rnn", "linear"), ("lstm", "blelloch")]
)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_time_cut_over_processes(pool: Pool, ranks: int, kind: str, method: str) -> None:
    found = pool.run(ranks, train_a_part, kind, method)
    layer = build(kind)
    plain = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[kind](3, 6, num_layers=2, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    steps, first, factors = inputs_and_factors()
    outputs, _ = plain(steps.requires_grad_(), states_of(kind, first.requires_grad_()))
    (outputs * factors).sum().backward()

    assert steps.grad is not None
    torch.testing.assert_close(torch.cat([each[0] for each in found]), outputs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([each[1] for each in found]), steps.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[0][2], first.grad, rtol=1e-10, atol=1e-12)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[0][3][name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_what_cannot_be_cut_is_refused() -> None:
    group = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]
    with pytest.raises(PenstockError, match="one direction"):
        ScanRNN(3, 6, bidirectional=True, group=group)
    layer = ScanRNN(3, 6, group=group)
    with pytest.raises(PenstockError, match="PackedSequence"):
        layer(nn.utils.rnn.pack_sequence([torch.ones(2, 3)]))
