"""A recurrence whose time is cut over processes equals the same one in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import PenstockError
from penstock.scan import ScanRNN
from support.jobs import scan_jobs
from support.processes import Pool


@pytest.mark.parametrize(("kind", "method"), [("rnn", "blelloch"), ("gru", "chunked"), ("rnn", "linear")])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_time_cut_over_processes(pool: Pool, ranks: int, kind: str, method: str) -> None:
    found = pool.run(ranks, scan_jobs.train_a_part, kind, method)
    layer = scan_jobs.build(kind)
    plain = {"rnn": nn.RNN, "gru": nn.GRU}[kind](3, 6, num_layers=2, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    steps, first, factors = scan_jobs.inputs_and_factors()
    outputs, _ = plain(steps.requires_grad_(), first.requires_grad_())
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
