"""Replicated stages equal the oracle bit for bit: any counts, both ways to share microbatches, every schedule."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support import models
from support.processes import Pool
from support.training import Case, assert_equal, run_pipeline, run_reference, train, train_by_oracle

SCHEDULES = ("gpipe", "1f1b-flush", "spp", "zb-h1", "pipedream", "2bw")


def test_replicas_without_a_microbatch_take_part_in_updates() -> None:
    """Two microbatches for three replicas, in minibatches of different sizes."""
    for schedule in SCHEDULES[:5]:
        tried = Case("layered", schedule, 2, 2, "adamw", replicas=(3, 1), samples=(16, 7, 3))

        assert_equal(run_reference(tried), run_pipeline(tried))


REPLICATED = penstock.Plan((penstock.Stage(0, 5, (2, 0)), penstock.Stage(5, 8, (1,))), "2bw", 4)
"""Two replicas of the first stage, the first of them on the last rank."""


def make(plan: penstock.Plan = REPLICATED, **options: Any) -> penstock.Pipeline:
    subject = models.LAYERED
    return penstock.Pipeline(subject.build(), subject.sample, subject.loss_fn, models.adamw, plan=plan, **options)


def train_replicated(directory: str) -> tuple[list[float], Tensor, float, tuple[float, ...]]:
    """The losses of two steps, a prediction and an evaluation, then a checkpoint and the losses after it."""
    pipe, batches = make(), models.LAYERED.batches
    losses = [pipe.step(x, y).loss for x, y in batches[:2]]
    x, y = batches[0]
    output, evaluated = pipe.predict(x[:7]), float(pipe.evaluate(x[:7], y[:7]).loss)
    pipe.save(directory)
    return [float(loss) for loss in losses], output, evaluated, train(pipe, batches[2:]).losses


def load_replicated(directory: str, plan: penstock.Plan = REPLICATED) -> tuple[float, tuple[float, ...]]:
    """An evaluation of the checkpoint, and the losses after it."""
    pipe = make(plan, seed=5)
    pipe.load(directory)
    x, y = models.LAYERED.batches[0]
    return float(pipe.evaluate(x[:7], y[:7]).loss), train(pipe, models.LAYERED.batches[2:]).losses


def test_predictions_evaluations_and_checkpoints_of_replicas(pool: Pool, tmp_path: Path) -> None:
    """The buffers are the first replica's everywhere, whichever rank evaluates or writes."""
    losses, output, evaluated, rest = train_replicated(str(tmp_path / "alone"))
    for other in pool.run(3, train_replicated, str(tmp_path / "saved")):
        assert (other[0], other[2], other[3]) == (losses, evaluated, rest)
        assert torch.equal(other[1], output)
    for directory in (tmp_path / "saved", tmp_path / "alone"):
        loaded = load_replicated(str(directory))
        # Before its first step a pipeline evaluates microbatches of the sample's size, whose sums round otherwise.
        assert loaded[0] == pytest.approx(evaluated, rel=1e-12)
        assert loaded[1] == rest
        assert pool.run(3, load_replicated, str(directory)) == [loaded] * 3
        # Without replicas it goes on with other numbers, since a stage's mean then sees all microbatches.
        straight = penstock.Plan.uniform(8, 2, "2bw", 4)
        assert pool.run(2, load_replicated, str(directory), straight)[0][0] == loaded[0]


class Recurrent(nn.Module):
    """An LSTM with dropout before it."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.lstm = nn.Dropout(0.2), nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(self.dropout(x))[0]


@pytest.mark.parametrize(("here", "there"), [(1, 2), (3, 2)])
def test_rows_that_come_in_one_piece_are_like_those_that_are_joined(here: int, there: int) -> None:
    """An LSTM's output does not lie in memory in the order of its dimensions, and dropout draws in that order."""
    ends = (penstock.Stage(0, 2, tuple(range(here))), penstock.Stage(2, 4, tuple(range(here, here + there))))
    torch.manual_seed(6)
    batches = [(torch.randn(7, 5, 6).double(), torch.randn(7, 5, 6).double()) for _ in range(2)]
    options: dict[str, Any] = {
        "sample": (batches[0][0][:3],),
        "loss_fn": F.mse_loss,
        "optimizer": models.momentum,
        "plan": penstock.Plan(ends, microbatches=2, routing="split"),
    }
    model = nn.Sequential(*(Recurrent() for _ in range(4))).double()
    expected = train_by_oracle(model, batches, **options)

    assert_equal(expected, train(penstock.Pipeline(model, **options), batches))
