"""The benchmark of the default cut reports every layer and every number of stages."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import balance


def test_a_model_has_a_row_for_every_layer_and_number_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))

    subject = (build, {"input": torch.randn(4, 8)}, torch.randn(4, 8), F.mse_loss)
    monkeypatch.setitem(balance.SUBJECTS, "tiny", subject)  # type: ignore[misc]
    rows = balance.measure("tiny", torch.device("cpu"), iterations=1, layers=True)

    assert len(rows) == 5 + len(balance.STAGES)
    for row, stages in zip(rows[5:], balance.STAGES, strict=True):
        name, layers, number, *_ = row.split()
        assert (name, layers, number) == ("tiny", "5", str(stages))
        # No cut is better than the best.
        assert all(float(share) >= 0 for share in re.findall(r"(\S+)%", row)) and row.count("%") == 3
