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


def test_a_model_that_exists_is_changed() -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[-1], names)
    assert isinstance(names["model"].recurrence, ScanLSTM) and isinstance(names["model"].head, ScanSequential)
    torch.manual_seed(0)
    options: dict[str, Any] = {"bidirectional": True, "dtype": torch.float64, "bias": False}
    model = nn.ModuleDict(
        {
            "plain": nn.RNN(3, 4, nonlinearity="relu", **options),
            "gates": nn.Sequential(nn.GRU(3, 4, num_layers=2, dropout=0.5, batch_first=True, **options).eval()),
        }
    )
    inputs = torch.randn(5, 2, 3, dtype=torch.float64)
    expected = model["plain"](inputs)[0], model["gates"](inputs)[0]
    changed = names["with_scans"](model)

    assert isinstance(changed["plain"], ScanRNN) and isinstance(changed["gates"][0], ScanGRU)
    assert torch.equal(changed["plain"](inputs)[0], expected[0])
    assert torch.equal(changed["gates"](inputs)[0], expected[1])
