"""Pipelines whose backwards are in two parts: the bits of the oracle with everything that pipelines do."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.scheduling import BackwardInput, BackwardWeight
from penstock.scheduling.actions import Reduce
from support import models
from support.split_backward_cases import CASES
from support.training import Case, assert_equal, run_pipeline, run_reference, stages_on_a_rank

SCHEDULES = ("zb-h1", "zb-v")


def test_replicas_sum_up_when_the_last_weight_part_is_done() -> None:
    case = Case("layered", "zb-h1", 2, 5, replicas=(1, 2))
    for row in penstock.schedule(case.options["plan"]).step(0)[1:]:
        last = max(index for index, action in enumerate(row) if isinstance(action, BackwardWeight))

        assert isinstance(row[last + 1], Reduce)
    assert_equal(run_reference(case), run_pipeline(case))


def test_hooks_of_weights_run_with_their_last_gradient() -> None:
    """So that sums over replicas can begin while the weight part goes on; on what is added before no hook is needed."""
    bench, _ = CASES["block"]
    made: list[Tensor] = []
    hooks = [leaf.register_post_accumulate_grad_hook(made.append) for leaf in bench.leaves]
    bench.run(divided=True, hooked=True)
    counts = {id(leaf): sum(leaf is other for other in made) for leaf in bench.leaves}
    for hook in hooks:
        hook.remove()

    assert set(counts.values()) == {3}


class Breaking(nn.Module):
    """Its backward fails."""

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(self.fail) if x.requires_grad else None
        return x * 2

    def fail(self, gradient: Tensor) -> None:
        """Instead of a gradient."""
        raise ValueError("the gradient is broken")


def test_an_error_names_the_part() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Breaking(), nn.Linear(6, 3)).double()
    x, y = models.LAYERED.batches[0]
    pipe = penstock.Pipeline(
        model, (x[:2],), models.LAYERED.loss_fn, models.plain, schedule="zb-h1", microbatches=2, stages=2
    )
    with pytest.raises(ValueError, match="the gradient is broken") as caught:
        pipe.step(x, y)

    assert caught.value.__notes__[0] == ("penstock: this was action 1I0@0 of rank 1; stage 1 holds the layers 2 to 3")


REFUSED = {
    "compile": (
        {"compile": {"backend": "eager"}},
        "compile= makes one function of a stage's backward, which computes both: expected stages whose backward "
        "autograd can do in two parts. Leave compile= out, or choose '1f1b-flush'",
    ),
    "layers": (
        {"recompute": "layers"},
        'recompute="layers" (stages 0, 1, 2) would hardly hold less than recompute=True, since what layers read and '
        "the gradients of their results are kept for the gradients of weights: expected stages whose backward autograd "
        "can do in two parts. Use recompute=True, or a set of stages, or choose '1f1b-flush'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_divided_is_refused(what: str) -> None:
    options, reason = REFUSED[what]
    case = Case("layered", "zb-h1", 3, 4)
    with pytest.raises(penstock.PlanError) as caught:
        run_pipeline(case, **options)

    assert str(caught.value) == (
        "schedule 'zb-h1' computes the gradients of inputs and those of weights apart, and " + reason
    )
    # One stage sends no gradients, and its backwards are whole.
    if what == "layers":
        alone = replace(case, ranks=1)
        assert_equal(run_reference(alone), run_pipeline(alone, **options))


class Reentrant(nn.Linear):
    """Is computed again in its backward, in the way that autograd can only do as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_reentrant_checkpoint_is_refused_with_a_way_out(schedule: str) -> None:
    layers = [nn.Linear(4, 4), *(Reentrant(4, 4) for _ in range(2)), nn.Linear(4, 4)]
    options: dict[str, Any] = {"stages": 4, "microbatches": 2}
    sample = (torch.ones(2, 4),)
    pipe = penstock.Pipeline(layers, sample, nn.functional.mse_loss, models.plain, schedule=schedule, **options)
    with pytest.raises(penstock.PenstockError, match=r"as the schedule= .* asks: .* Expected use_reentrant=False"):
        pipe.step(torch.ones(4, 4), torch.ones(4, 4))

    whole = penstock.Pipeline(layers, sample, nn.functional.mse_loss, models.plain, schedule="1f1b-flush", **options)
    assert whole.step(torch.ones(4, 4), torch.ones(4, 4)).loss.item() > 0


def test_programs_have_both_parts() -> None:
    """What this file is about does happen."""
    for schedule in SCHEDULES:
        case = Case("layered", schedule, 3, 4, stages_per_rank=stages_on_a_rank(schedule))
        actions = [action for row in penstock.schedule(case.options["plan"]).step(0) for action in row]
        for kind in (BackwardInput, BackwardWeight):
            assert sum(isinstance(action, kind) for action in actions) >= 8
