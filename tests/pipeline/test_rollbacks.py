"""`on_nonfinite="rollback"`: a training goes back to its newest checkpoint, and is one that never saw the bad batch."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.runtime.checkpoints.resumption import MOST_RETURNS
from support.counters import Counter
from support.jobs.nonfinite_jobs import Rollback, run_rollback, run_rollbacks
from support.processes import Pool
from support.training import Case, Outcome, assert_equal, stages_on_a_rank

JOBS = [
    *(
        Rollback(Case("skipping", schedule, 2, 4, "adamw", stages_per_rank=stages_on_a_rank(schedule)))
        for schedule in ("gpipe", "interleaved", "zb-h1")
    ),
    # The statistics of the bad batch are forgotten, too.
    *(Rollback(Case("normalized", schedule, 3, 3), wait=False) for schedule in ("1f1b-flush", "2bw", "pipedream")),
    Rollback(Case("normalized", "vertical", 3, 3), saved=1, wait=False),
    Rollback(Case("layered", "2bw", 2, 4, replicas=(2, 1)), saved=1, wait=False),
]
APART = {
    2: [Rollback(Case("skipping", "1f1b-flush", 2, 5, "adamw")), Rollback(Case("layered", "2bw", 2, 4), wait=False)],
    3: [
        Rollback(Case("normalized", "2bw", 3, 3), wait=False),
        Rollback(Case("normalized", "1f1b-flush", 3, 3), saved=1),
    ],
}


def check(job: Rollback, found: Outcome, rollbacks: int) -> None:
    expected = penstock.reference_train(job.case.build(), job.seen, on_nonfinite="skip", **job.case.options)

    assert rollbacks == 1
    assert_equal(Outcome(expected.losses, expected.state), found)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.case} {job.saved}")
def test_it_equals_a_training_without_the_batch(job: Rollback, tmp_path: Path) -> None:
    check(job, *run_rollback(job, str(tmp_path)))


@pytest.mark.parametrize("processes", [2, 3])
def test_all_processes_go_back_together(pool: Pool, processes: int, tmp_path: Path) -> None:
    jobs = APART[processes]
    for answers in pool.run(processes, run_rollbacks, jobs, str(tmp_path)):
        for job, answer in zip(jobs, answers, strict=True):
            check(job, *answer)


def make_pipeline(directory: Any, **options: Any) -> penstock.Pipeline:
    """Two stages of a layer."""
    torch.manual_seed(0)
    return penstock.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        (torch.zeros(2, 4),),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **{"loss_fn": F.mse_loss, "stages": 2, "resume": directory, "on_nonfinite": "rollback", **options},
    )


GOOD, NAN = torch.ones(2, 4), torch.full((2, 4), torch.nan)


def test_it_goes_back_a_few_times_to_a_step_and_then_gives_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make_pipeline(tmp_path) as pipe:
        for _ in range(2):
            pipe.step(GOOD, GOOD)
        pipe.save(tmp_path)
        with caplog.at_level(logging.WARNING, "penstock"):
            for _ in range(MOST_RETURNS):
                pipe.step(GOOD, GOOD)
                pipe.step(NAN, GOOD)
        assert (pipe.steps, pipe.rollbacks) == (2, MOST_RETURNS)
        assert "the loss of step 3 (counted from 0) is nan: went back from step 4 to step 2" in caplog.text
        with pytest.raises(penstock.PenstockError, match="after 3 returns to step 2"):
            pipe.step(NAN, GOOD)


def test_a_newer_checkpoint_begins_the_count_anew(tmp_path: Path) -> None:
    with make_pipeline(tmp_path) as pipe:
        for _ in range(MOST_RETURNS + 1):
            pipe.step(GOOD, GOOD)
            pipe.save(tmp_path)
            pipe.step(NAN, GOOD)
        assert (pipe.steps, pipe.rollbacks) == (MOST_RETURNS + 1,) * 2


def test_loaders_go_on_and_tracked_objects_go_back(tmp_path: Path) -> None:
    values = torch.arange(16.0).reshape(8, 2).repeat(1, 2)
    values[2] = torch.nan
    with make_pipeline(tmp_path) as pipe:
        counted = Counter()
        pipe.track(counted=counted)
        met = []
        for x, y in penstock.loader(torch.utils.data.TensorDataset(values, values), 1):
            counted.steps += 1
            pipe.step(x, y)
            met.append(float(x[0, 0]))
            if pipe.steps == 1:
                pipe.save(tmp_path)
        assert met[3:] == [6.0, 8.0, 10.0, 12.0, 14.0], "no batch came twice"
        assert (pipe.steps, counted.steps) == (6, 6)


def test_gradients_that_are_not_finite_make_no_update_and_so_no_bad_checkpoint(tmp_path: Path) -> None:
    """The root has a value at zero, and no finite gradient."""
    with make_pipeline(tmp_path, loss_fn=lambda output, target: (output * target).square().sum().sqrt()) as pipe:
        before = {name: tensor.clone() for name, tensor in pipe.named_parameters()}
        loss = float(pipe.step(GOOD, GOOD * 0).loss)

        assert (loss, pipe.skipped_updates, pipe.rollbacks) == (0.0, 1, 0)
        assert all(torch.equal(before[name], tensor) for name, tensor in pipe.named_parameters())


def test_it_needs_a_directory_and_a_checkpoint_in_it(tmp_path: Path) -> None:
    with pytest.raises(penstock.PenstockError, match=r"on_nonfinite='rollback' .* expected a directory, found None"):
        make_pipeline(None)
    with make_pipeline(tmp_path) as pipe:
        with pytest.raises(penstock.PenstockError, match=r"is nan: on_nonfinite='rollback' expected a checkpoint"):
            pipe.step(NAN, GOOD)
        # Nothing is lost by it.
        pipe.step(GOOD, GOOD)
        pipe.save(tmp_path)
