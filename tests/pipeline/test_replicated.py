"""Replicated stages equal the oracle bit for bit: any counts, both ways to share microbatches, every schedule."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from support import models
from support.processes import Pool
from support.random_models import Averaging
from support.training import (
    Case,
    assert_equal,
    assert_ranks_equal,
    run_cases,
    run_pipeline,
    run_reference,
    train,
    train_by_oracle,
)

COUNTS = ((2, 1), (1, 2), (2, 1, 1), (1, 2, 1), (3, 1), (2, 3), (2, 2), (3,))
SCHEDULES = ("gpipe", "1f1b-flush", "spp", "zb-h1", "pipedream", "2bw")


def cases(counts: tuple[int, ...], subject: str, split: bool = False) -> Iterator[Case]:
    """Every schedule that allows these counts. Five microbatches leave a remainder for all of them."""
    for schedule in SCHEDULES:
        yield Case(subject, schedule, len(counts), 5, replicas=counts, split=split)
    if len(set(counts)) == 1 or split:
        yield Case(subject, "vertical", len(counts), 5, replicas=counts, split=split)
    if len(set(counts)) == 1:
        yield Case(subject, "zb-v", len(counts), 5, stages_per_rank=2, replicas=counts, split=split)
        per_pipeline = 2 * len(counts)
        yield Case(
            subject,
            "interleaved",
            len(counts),
            per_pipeline if split else counts[0] * per_pipeline,
            stages_per_rank=2,
            replicas=counts,
            split=split,
        )


SMALL: list[tuple[int, ...]] = [counts for counts in COUNTS if sum(counts) <= 4]
"""Those that several processes train, too: half of the cases there, and the others in one."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["in turn", "split"])
def test_one_process(counts: tuple[int, ...], split: bool) -> None:
    for tried in take_turns(counts, split)[0] if counts in SMALL else cases(counts, "layered", split):
        actual = run_pipeline(tried)

        assert_equal(run_reference(tried), actual)
        assert set(run_reference(tried).state) == set(actual.state)


@pytest.mark.parametrize("split", [False, True], ids=["in turn", "split"])
def test_skip_connections_pass_replicas(split: bool) -> None:
    for schedule in ("1f1b-flush", "pipedream", "2bw"):
        tried = Case("skipping", schedule, 3, 4 if split else 6, "adamw", replicas=(2, 3, 1), split=split)

        assert_equal(run_reference(tried), run_pipeline(tried))


@pytest.mark.parametrize("schedule", [*SCHEDULES, "vertical"])
def test_drains_end_rounds_early(schedule: str) -> None:
    counts = (2, 2) if schedule == "vertical" else (2, 3)
    tried = Case("layered", schedule, 2, 5, "adamw", replicas=counts, drain_after=(0, 2))

    assert_equal(run_reference(tried), run_pipeline(tried))


def test_replicas_without_a_microbatch_take_part_in_updates() -> None:
    """Two microbatches for three replicas, in minibatches of different sizes."""
    for schedule in SCHEDULES[:5]:
        tried = Case("layered", schedule, 2, 2, "adamw", replicas=(3, 1), samples=(16, 7, 3))

        assert_equal(run_reference(tried), run_pipeline(tried))


def test_batchnorm_sees_the_microbatches_of_its_replica() -> None:
    tried = Case("normalized", "1f1b-flush", 2, 4, replicas=(2, 2))

    assert_equal(run_reference(tried), run_pipeline(tried))


@pytest.mark.parametrize("replicas", [(2, 1), (2, 3)])
def test_a_buffer_that_is_assigned_anew_is_one_for_each_replica(replicas: tuple[int, int]) -> None:
    first, second = replicas
    stages = (penstock.Stage(0, 2, tuple(range(first))), penstock.Stage(2, 4, tuple(range(first, first + second))))
    x, y = torch.randn(2, 3, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {
        "sample": (x[0, :2],),
        "loss_fn": nn.functional.mse_loss,
        "optimizer": models.momentum,
        "plan": penstock.Plan(stages, schedule="gpipe", microbatches=6),
    }

    def build() -> list[nn.Module]:
        torch.manual_seed(4)
        return [nn.Linear(6, 6).double(), Averaging().double(), nn.Linear(6, 6).double(), nn.Tanh()]

    batches, drains = list(zip(x, y, strict=True)), (0, 1)

    assert_equal(
        train_by_oracle(build(), batches, **options, drain_after=drains),
        train(penstock.Pipeline(build(), **options), batches, drains),
    )


def take_turns(counts: tuple[int, ...], split: bool) -> tuple[list[Case], list[Case]]:
    """Every schedule is in both halves, and with every number of replicas in one of them."""
    tried, turn = list(cases(counts, "layered", split)), (SMALL.index(counts) + split) % 2
    return tried[turn::2], tried[1 - turn :: 2]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("counts", SMALL, ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["in turn", "split"])
def test_several_processes(pool: Pool, counts: tuple[int, ...], split: bool) -> None:
    tried = take_turns(counts, split)[1]
    assert_ranks_equal(pool.run(sum(counts), run_cases, tried), [run_reference(one) for one in tried])


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
