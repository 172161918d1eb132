"""Losses that are not finite: an error that says where they come from, or updates that are left out."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support.jobs.nonfinite_jobs import BAD, poisoned_batches, run_poisoned, run_until_poisoned
from support.processes import Pool
from support.training import Case, Outcome, stages_on_a_rank

CASES = [
    *(
        Case("perceptron", schedule, 2, 4, stages_per_rank=stages_on_a_rank(schedule))
        for schedule in ("1f1b-flush", "interleaved", "zb-h1", "pipedream", "vertical")
    ),
    Case("perceptron", "2bw", 3, 4, "adamw", drain_after=(3,)),
    Case("perceptron", "1f1b-flush", 2, 4, replicas=(2, 2)),
]


def assert_alike(expected: Outcome, found: Outcome) -> None:
    """The same bits; NaN equals NaN."""
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(expected.losses, found.losses, strict=True))
    assert all(torch.equal(tensor, found.state[name]) for name, tensor in expected.state.items() if name in found.state)


def reference(case: Case) -> Outcome:
    batches, options = poisoned_batches(case), case.options
    made = penstock.reference_train(case.build(), batches, on_nonfinite="skip", drain_after=case.drain_after, **options)
    return Outcome(made.losses, made.state)


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


def test_the_layer_that_made_it_is_named_and_no_weight_is_changed() -> None:
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
    with pytest.raises(penstock.PenstockError, match=r"the loss of .* is nan.*output is not finite is 3"):
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
    with pytest.raises(penstock.PenstockError, match="so loss_fn made it"):
        pipe.step(torch.randn(6, 4), torch.randn(6, 4))


def test_what_on_nonfinite_may_be() -> None:
    case = Case("perceptron", "gpipe", 2, 1)
    with pytest.raises(penstock.PenstockError, match=r"expected 'raise' .* 'skip' .* or 'rollback'"):
        penstock.Pipeline(case.build(), **case.options, on_nonfinite="ignore")  # type: ignore[arg-type]
    pipe = penstock.Pipeline(case.build(), **case.options, on_nonfinite="skip")
    assert (pipe.loss_scale, pipe.skipped_updates) == (None, 0)
