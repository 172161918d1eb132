"""Clipping by the norm over all stages: PyTorch's own number."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.runtime.parameters.gradient_norms import drop_absent
from support import models
from support.training import (
    FLUSHING,
    Case,
    Outcome,
    assert_equal,
    run_pipeline,
    stages_on_a_rank,
    train,
    train_by_loop,
    train_by_oracle,
)

MOST = 0.3
"""Less than the norms of the first updates, more than some later ones."""


def run_clipped(case: Case, most: Any = MOST) -> Outcome:
    return run_pipeline(case, clip_grad_norm=most)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("schedule", FLUSHING)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_flush_has_the_numbers_of_one_device(schedule: str, stages: int) -> None:
    ranks = max(1, stages // stages_on_a_rank(schedule))
    stages = max(stages, stages_on_a_rank(schedule)) if schedule in ("zb-v", "v-half", "v-min") else stages
    case = Case("perceptron", schedule, ranks, 1, stages_per_rank=stages // ranks)
    case = replace(case, microbatches=ranks) if schedule == "interleaved" else case
    model, options = case.build(), case.options
    norms: list[Tensor] = []
    expected = train_by_loop(
        model,
        case.batches,
        options["loss_fn"],
        models.momentum,
        case.microbatches,
        before_step=lambda: norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)),
    )

    assert run_clipped(case).losses == expected.losses
    assert max(norms) > MOST


class HeadFirst(models.Perceptron):
    """Registers its blocks behind the head, which it runs after them."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("blocks", self._modules.pop("blocks"))


def test_norms_add_up_in_the_order_of_the_models_parameters() -> None:
    torch.manual_seed(3)
    model, case = HeadFirst().double(), Case("perceptron", "1f1b-flush", 3, 2)
    pipe = penstock.Pipeline(copy.deepcopy(model), **case.options, clip_grad_norm=MOST)
    expected = train_by_loop(
        model,
        case.batches * 3,
        F.cross_entropy,
        models.momentum,
        2,
        before_step=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), MOST),
    )

    assert_equal(expected, train(pipe, case.batches * 3))


@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad_norm": 1.0},
        {"loss_scale": "dynamic"},
        {"loss_scale": 8.0},
        {"on_nonfinite": "skip"},
        {"on_nonfinite": "rollback", "resume": "runs/rollback"},
    ],
    ids=str,
)
def test_schedules_whose_stages_update_at_their_own_times_are_refused(options: dict[str, Any]) -> None:
    """Where a plan, a name, or a function says it; by the oracle; and by `rehearse`."""
    case = Case("perceptron", "pipedream", 2, 4)
    named = {**case.options, "plan": None, "schedule": "pipedream", "microbatches": 4, "vertical_sync": True}
    planned = {**case.options, "plan": lambda processes: case.options["plan"]}
    refused = pytest.raises(
        penstock.ScheduleError, match=r"'pipedream': clip_grad_norm=, loss_scale= and .*choose '2bw' or a flushing"
    )
    for given in (case.options, named, planned):
        with refused:
            penstock.Pipeline(case.build(), **given, **options)
    with refused:
        penstock.rehearse(case.build(), case.batches, **case.options, **options)
    options.pop("resume", None)
    with refused:
        penstock.reference_train(case.build(), case.batches, **case.options, **options)


def test_the_norm_can_be_read() -> None:
    case = Case("perceptron", "gpipe", 2, 1)
    model, pipe = case.build(), penstock.Pipeline(case.build(), **case.options, clip_grad_norm=MOST)
    x, y = case.batches[0]

    assert pipe.gradient_norm is None
    pipe.step(x, y)
    case.options["loss_fn"](model(x), y).backward()
    assert pipe.gradient_norm == torch.nn.utils.clip_grad_norm_(model.parameters(), MOST).item()


def test_gradients_that_are_not_there_count_nothing() -> None:
    norms = torch.tensor([3.0, -1.0, 0.0, 4.0, -1.0])

    assert drop_absent(norms, shorter=True).tolist() == [3.0, 0.0, 4.0]
    assert drop_absent(norms, shorter=False).tolist() == [3.0, 0.0, 0.0, 4.0, 0.0]


class Shared(nn.Module):
    """Multiplies with a weight that another layer has as well, and of which it may make no gradient."""

    def __init__(self, weight: nn.Parameter, trains: bool) -> None:
        super().__init__()
        self.weight, self.trains = weight, trains

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ (self.weight if self.trains else self.weight.detach()))


@pytest.mark.parametrize("schedule", ["1f1b-flush", "interleaved", "2bw"])
@pytest.mark.parametrize("trains", [(True, False), (False, True)], ids=str)
def test_a_gradient_that_two_stages_step_with_is_changed_once_in_each(schedule: str, trains: tuple[bool, bool]) -> None:
    """Only one of them makes a gradient of the weight that they share, and both scale it down, in one process."""
    torch.manual_seed(0)
    each = 2 if schedule == "interleaved" else 1
    weight = nn.Parameter(torch.randn(6, 6))
    model = nn.Sequential(Shared(weight, trains[0]), nn.Linear(6, 6), nn.Linear(6, 6), Shared(weight, trains[1]))
    model.double()
    batches = [(torch.randn(8, 6).double(), torch.randn(8, 6).double()) for _ in range(4)]
    options = {
        "sample": (batches[0][0][:2],),
        "loss_fn": F.mse_loss,
        "optimizer": models.momentum,
        "clip_grad_norm": 0.05,
        "loss_scale": 1024.0,
        "plan": penstock.Plan.uniform(4, 4, schedule=schedule, microbatches=4, stages_per_rank=each),
    }
    expected = train_by_oracle(model, batches, **options)

    assert_equal(expected, train(penstock.Pipeline(model, **options), batches))
