"""A frozen weight that two layers hold: where one of them writes it, no cut falls between them."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock.capturing import capture
from support.blocks import WIDTH, Block, batches, sgd, squares
from support.processes import Pool
from support.training import Outcome, assert_equal, train_by_loop

ROUNDS = batches((6, 5, 8, 7))
SharedWrite = tuple[bool, str, int]
"""Whether the weight is written, the schedule, and the number of microbatches."""


class Reading(Block):
    """Adds what the average computes."""

    def __init__(self, average: nn.Linear) -> None:
        super().__init__()
        self.average = average

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(x, self.average.weight.clone())


class Writing(Reading):
    """Moves the average towards its own weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.average.weight.data.mul_(0.9).add_(self.linear.weight.data, alpha=0.1)
        return super().forward(x)


def make_model(writes: bool) -> nn.Sequential:
    torch.manual_seed(5)
    average = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    second = (Writing if writes else Reading)(average)
    return nn.Sequential(Block(), second, Block(), Reading(average), nn.Linear(WIDTH, 3)).double()


def train(run: SharedWrite) -> tuple[list[float], dict[str, Tensor], int]:
    """The losses, the weights of the whole model, and the number of layers."""
    writes, schedule, microbatches = run
    with penstock.Pipeline(
        make_model(writes),
        (ROUNDS[0][0],),
        squares,
        sgd,
        schedule=schedule,
        microbatches=microbatches,
        stages=dist.get_world_size() if dist.is_initialized() else 2,
    ) as pipe:
        losses = [pipe.step(x, target).loss.item() for x, target in ROUNDS]
        return losses, dict(pipe.full_state_dict(rank=None) or {}), pipe.plan.layers


def train_these(runs: Sequence[SharedWrite]) -> list[tuple[list[float], dict[str, Tensor], int]]:
    return [train(run) for run in runs]


RUNS: list[SharedWrite] = [
    (writes, schedule, microbatches)
    for writes in (True, False)
    for schedule, microbatches in (("1f1b-flush", 1), ("1f1b-flush", 2), ("zb-h1", 2))
]


def assert_plain(run: SharedWrite, found: tuple[list[float], dict[str, Tensor], int]) -> None:
    writes, _, microbatches = run
    expected = train_by_loop(make_model(writes), ROUNDS, squares, sgd, microbatches)

    assert_equal(expected, Outcome(tuple(found[0]), found[1]))
    assert found[1].keys() == expected.state.keys()
    # The writer, the reader and what is between them are one layer.
    assert found[2] == (3 if writes else 5)


@pytest.mark.parametrize("run", RUNS)
def test_one_process(run: SharedWrite) -> None:
    assert_plain(run, train(run))


def test_two_processes(pool: Pool) -> None:
    for outcomes in pool.run(2, train_these, RUNS):
        for run, found in zip(RUNS, outcomes, strict=True):
            assert_plain(run, found)


def test_capture_leaves_a_weight_that_a_layer_writes() -> None:
    model = make_model(writes=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    capture(model, (ROUNDS[0][0],)).evaluation()

    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
