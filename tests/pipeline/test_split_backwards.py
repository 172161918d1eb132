"""Pipelines whose backwards are in two parts: the bits of the oracle with everything that pipelines do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.scheduling import BackwardWeight
from penstock.scheduling.actions import Reduce
from support import models
from support.split_backward_cases import CASES
from support.training import Case, assert_equal, run_pipeline, run_reference

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
