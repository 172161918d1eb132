"""Losses that are not finite: an error that says where they come from, or updates that are left out; or a training that
goes back to its newest checkpoint, and is one that never saw the bad batch.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.runtime.checkpoints.resumption import MOST_RETURNS
from support.counters import Counter
from support.processes import Pool
from support.training import Case, Outcome, assert_equal, stages_on_a_rank, train, train_by_oracle

CASES = [
    *(
        Case("perceptron", schedule, 2, 4, stages_per_rank=stages_on_a_rank(schedule))
        for schedule in ("1f1b-flush", "interleaved", "zb-h1", "2bw")
    ),
    Case("perceptron", "2bw", 3, 4, "adamw", drain_after=(3,)),
    Case("perceptron", "1f1b-flush", 2, 4, replicas=(2, 2)),
]


BAD = 2
"""The number of the batch with a NaN in it."""


def poisoned_batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    """The batches of `case`, twice, with one that is bad."""
    batches = [(x.clone(), y) for x, y in case.batches * 2]
    batches[BAD][0][1] = torch.nan
    return batches


def run_poisoned(case: Case, **options: Any) -> tuple[Outcome, int]:
    """What is left of a training with ``on_nonfinite="skip"``, and how many updates were left out."""
    pipe = penstock.Pipeline(case.build(), **case.options, on_nonfinite="skip", **options)
    outcome = train(pipe, poisoned_batches(case), case.drain_after)
    return outcome, pipe.skipped_updates


def run_until_poisoned(case: Case) -> tuple[int, str]:
    """How many steps came before the error, and the error."""
    pipe = penstock.Pipeline(case.build(), **{**case.options, "loss_fn": F.cross_entropy})
    steps = 0
    try:
        for x, y in poisoned_batches(case):
            float(pipe.step(x, y).loss)
            steps += 1
    except penstock.PenstockError as error:
        return steps, str(error)
    return steps, ""


@dataclass(frozen=True)
class Rollback:
    """A training of `case` that goes back when it meets the bad batch. It is saved after `saved` steps."""

    case: Case
    saved: int = BAD
    wait: bool = True
    """Whether saves stop the training."""

    @property
    def seen(self) -> list[tuple[Tensor, Tensor]]:
        """The batches that count in the end: those since the last checkpoint before the bad one are left out."""
        batches = poisoned_batches(self.case)
        return batches[: self.saved] + batches[BAD + 1 :]


def run_rollback(job: Rollback, directory: str) -> tuple[Outcome, int]:
    """What is left of the training, with the losses of the steps that count, and how often it went back."""
    case, losses = job.case, list[float]()
    pipe = penstock.Pipeline(case.build(), **case.options, on_nonfinite="rollback", resume=directory)
    for x, y in poisoned_batches(case):
        losses.append(float(pipe.step(x, y).loss))
        del losses[pipe.steps :]
        if pipe.steps == job.saved and not pipe.rollbacks:
            pipe.save(directory) if job.wait else pipe.save(directory, wait=False)
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    found = Outcome(tuple(losses), state), pipe.rollbacks
    pipe.close()
    return found


def run_rollbacks(jobs: list[Rollback], directory: str) -> list[tuple[Outcome, int]]:
    """Several, one after the other, in the present process group."""
    return [run_rollback(job, f"{directory}/{number}") for number, job in enumerate(jobs)]


def assert_alike(expected: Outcome, found: Outcome) -> None:
    """The same bits; NaN equals NaN."""
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(expected.losses, found.losses, strict=True))
    assert all(torch.equal(tensor, found.state[name]) for name, tensor in expected.state.items() if name in found.state)


def reference(case: Case) -> Outcome:
    options = {**case.options, "on_nonfinite": "skip", "drain_after": case.drain_after}
    return train_by_oracle(case.build(), poisoned_batches(case), **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_skipped_updates_equal_the_oracle(case: Case) -> None:
    expected, (found, skipped) = reference(case), run_poisoned(case)

    assert skipped >= 1
    assert all(tensor.isfinite().all() for tensor in found.state.values())
    assert_alike(expected, found)


def test_all_processes_skip_together(pool: Pool) -> None:
    case = Case("perceptron", "2bw", 3, 4)
    answers = pool.run(3, run_poisoned, case)

    assert [skipped for _, skipped in answers] == [1, 1, 1]
    for found, _ in answers:
        assert_alike(reference(case), found)


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_a_loss_that_is_not_finite_ends_every_process(pool: Pool, schedule: str) -> None:
    for steps, error in pool.run(2, run_until_poisoned, Case("perceptron", schedule, 2, 4)):
        assert steps == BAD
        assert "is nan: expected a finite number" in error
        assert "What this stage received from the stages before it is not finite already" in error


class Root(nn.Module):
    """The root of a number, which has none below zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


def test_the_stage_that_made_it_is_named_and_no_weight_is_changed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), Root(), nn.Tanh())
    pipe = penstock.Pipeline(
        model,
        sample=(torch.randn(3, 4),),
        loss_fn=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        stages=2,
        microbatches=2,
    )
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with pytest.raises(penstock.PenstockError, match=r"the loss of .* is nan.*The last stage or loss_fn made it"):
        pipe.step(torch.randn(6, 4), torch.randn(6, 4))

    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())


def test_a_loss_function_that_made_it_is_named() -> None:
    pipe = penstock.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        sample=(torch.randn(3, 4),),
        loss_fn=lambda output, target: (output.mean() * 0).log(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        stages=2,
    )
    with pytest.raises(penstock.PenstockError, match="The last stage or loss_fn made it"):
        pipe.step(torch.randn(6, 4), torch.randn(6, 4))


def test_what_on_nonfinite_may_be() -> None:
    case = Case("perceptron", "gpipe", 2, 1)
    with pytest.raises(penstock.PenstockError, match="on_nonfinite: expected one of raise, skip, rollback"):
        penstock.Pipeline(case.build(), **case.options, on_nonfinite="ignore")  # type: ignore[arg-type]
    pipe = penstock.Pipeline(case.build(), **case.options, on_nonfinite="skip")
    assert (pipe.loss_scale, pipe.skipped_updates) == (None, 0)


JOBS = [
    *(
        Rollback(Case("skipping", schedule, 2, 4, "adamw", stages_per_rank=stages_on_a_rank(schedule)))
        for schedule in ("gpipe", "interleaved", "zb-h1")
    ),
    # The statistics of the bad batch are forgotten, too.
    *(Rollback(Case("normalized", schedule, 3, 3), wait=False) for schedule in ("1f1b-flush", "2bw")),
    Rollback(Case("normalized", "2bw", 3, 3), saved=1, wait=False),
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
    assert rollbacks == 1
    assert_equal(train_by_oracle(job.case.build(), job.seen, on_nonfinite="skip", **job.case.options), found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.case} {job.saved}")
def test_it_equals_a_training_without_the_batch(job: Rollback, tmp_path: Path) -> None:
    check(job, *run_rollback(job, str(tmp_path)))


@pytest.mark.sampled(1)
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
        counted, batches = Counter(), penstock.loader(torch.utils.data.TensorDataset(values, values), 1)
        pipe.track(counted=counted, batches=batches)
        met = []
        for x, y in batches:
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


class First(nn.Linear):
    """Hands numbers of another type on, beside its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(4, 4)
        self.dtype = dtype

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = super().forward(x)
        return x.nan_to_num(), x.detach().to(self.dtype)


class Last(nn.Linear):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return super().forward(x + (other.real if other.is_complex() else other).to(x.dtype))


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.bfloat16, torch.complex64, torch.float64],
    ids=str,
)
@pytest.mark.parametrize("early", [True, False], ids=["received", "made"])
def test_a_bad_number_of_any_type_is_traced_to_where_it_was_made(dtype: torch.dtype, early: bool) -> None:
    pipe = penstock.Pipeline(
        nn.ModuleList([First(dtype), Last(4, 4)]).double(),
        sample=(torch.randn(2, 4, dtype=torch.float64),),
        loss_fn=lambda output, target: (output * target).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        stages=2,
        microbatches=2,
        check="off",
    )
    x, target = torch.randn(4, 4, dtype=torch.float64), torch.ones(4, 4, dtype=torch.float64)
    (x if early else target)[:] = torch.nan
    origin = "received from the stages before it is not finite" if early else "The last stage or loss_fn made it"

    with pytest.raises(penstock.PenstockError, match=f"the loss of microbatch 0 .* is nan: .*{origin}"):
        float(pipe.step(x, target).loss)
