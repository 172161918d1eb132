"""Gradients that lie in memory otherwise than what they are of cross a cut as they are: sums would round otherwise."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support.processes import Pool

TOKENS, WIDTH, SAMPLES = 7, 12, 10


class Mixer(nn.Module):
    """A linear layer over the tokens, and one over the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = nn.Linear(TOKENS, TOKENS), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.channels(self.tokens(x.transpose(1, 2)).transpose(1, 2)).tanh()


class ColumnMajor(nn.Module):
    """A linear layer over a copy with its columns in memory, so that the gradient of the input has such columns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, WIDTH).T.contiguous().T.reshape(x.shape)).tanh()


BLOCKS = {"mixer": Mixer, "columns": ColumnMajor}


def differing(block: str, schedule: str, seeds: range) -> list[str]:
    """The weights of this process that differ from the oracle's after two steps, for any of `seeds`."""
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        model = nn.Sequential(*(BLOCKS[block]() for _ in range(4))).double()
        pairs = torch.randn(2, 2, SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
        batches = [(x, y) for x, y in pairs]
        options: dict[str, Any] = {
            "sample": (pairs[0, 0, : SAMPLES // 2],),
            "loss_fn": F.mse_loss,
            "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.1),
            "stages": 2,
            "microbatches": 2,
            "schedule": schedule,
        }
        expected = penstock.reference_train(copy.deepcopy(model), batches, **options).state
        with penstock.Pipeline(model, check="off", **options) as pipe:
            for x, y in batches:
                pipe.step(x, y)
            pipe.drain()
            found += [f"{seed} {name}" for name, p in pipe.named_parameters() if not torch.equal(p, expected[name])]
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["1f1b-flush", "zb-h1", "2bw"])
@pytest.mark.parametrize("block", BLOCKS)
def test_one_process_has_the_bits_of_the_oracle(block: str, schedule: str) -> None:
    assert differing(block, schedule, range(6)) == []


@pytest.mark.parametrize("schedule", ["1f1b-flush", "zb-h1"])
def test_several_processes_have_the_bits_of_the_oracle(pool: Pool, schedule: str) -> None:
    assert pool.run(2, differing, "columns", schedule, range(3)) == [[], []]
