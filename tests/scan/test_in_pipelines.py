"""Recurrences with a backward by scan train in pipeline stages as the oracle says, under weight versions, too."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.scan import DiagonalRecurrence, ScanGRU, ScanLSTM, ScanRNN, ScanSequential
from support.training import assert_equal, train, train_by_oracle


class Outputs(nn.Module):
    """Passes on the outputs of all steps."""

    def __init__(self, recurrence: nn.Module) -> None:
        super().__init__()
        self.recurrence = recurrence

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.recurrence(inputs)[0]
        return outputs


def build() -> nn.Sequential:
    torch.manual_seed(0)
    options: dict[str, Any] = {"batch_first": True, "dtype": torch.float64}
    return nn.Sequential(
        Outputs(ScanRNN(3, 6, method="blelloch", **options)),
        Outputs(ScanGRU(6, 5, num_layers=2, method="chunked", **options)),
        Outputs(ScanLSTM(5, 3, method="blelloch", **options)),
        Outputs(DiagonalRecurrence(3, 4, **options)),
        ScanSequential(nn.Linear(4, 3, dtype=torch.float64), nn.GELU(), nn.Linear(3, 4, dtype=torch.float64)),
        nn.Linear(4, 2, dtype=torch.float64),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b-flush", "zb-h1", "2bw", "pipedream"])
def test_stages_with_scans_equal_the_oracle(schedule: str) -> None:
    torch.manual_seed(1)
    batches = [((torch.randn(8, 17, 3, dtype=torch.float64),), torch.randn(8, 17, 2).double()) for _ in range(4)]
    options: dict[str, Any] = {
        "sample": (batches[0][0][0][:2],),
        "loss_fn": nn.functional.mse_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "schedule": schedule,
        "stages": 3,
        "microbatches": 4,
    }

    assert_equal(train_by_oracle(build(), batches, **options), train(penstock.Pipeline(build(), **options), batches))
