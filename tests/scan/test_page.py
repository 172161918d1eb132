"""The Python of docs/scan.md runs as it is copied, and changes a model as it says."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from penstock.scan import ScanGRU, ScanLSTM, ScanRNN, ScanSequential
from support.paths import ROOT

BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/scan.md").read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[-1][:40])
def test_a_block_runs_as_copied(block: str) -> None:
    exec(block, {})


def test_a_model_that_exists_keeps_its_weights() -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[-1], names)
    assert isinstance(names["scanning"], ScanLSTM) and isinstance(names["head"], ScanSequential)
    torch.manual_seed(0)
    options: dict[str, Any] = {"bidirectional": True, "dtype": torch.float64, "bias": False, "batch_first": True}
    plain, gates = nn.RNN(3, 4, nonlinearity="relu", **options), nn.GRU(3, 4, num_layers=2, **options)
    inputs = torch.randn(2, 5, 3, dtype=torch.float64)
    scans = (plain, ScanRNN(3, 4, nonlinearity="relu", **options)), (gates, ScanGRU(3, 4, num_layers=2, **options))
    for model, scanning in scans:
        scanning.load_state_dict(model.state_dict())
        assert torch.equal(scanning(inputs)[0], model(inputs)[0])
        model.load_state_dict(scanning.state_dict())
