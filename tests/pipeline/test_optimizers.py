"""What `optimizer=` and `lr_scheduler=` may be: groups by name, several optimizers, schedulers that step per update."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import penstock
from support import models
from support.processes import Pool
from support.training import Case, run_pipeline, train_by_loop


def warm(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Another rate for every update."""
    return LambdaLR(optimizer, lambda update: (1 + update) / 7)


def test_the_function_that_makes_an_optimizer_may_make_its_scheduler() -> None:
    made: list[torch.optim.lr_scheduler.LRScheduler] = []

    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        made.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        return optimizer

    x = torch.ones(2, 3)
    with penstock.Pipeline(nn.Linear(3, 3), (x,), nn.MSELoss(), build, stages=1) as pipe:
        pipe.step(x, x)
        made[0].step()

        assert pipe.step(x, x).lr[0] == pytest.approx(0.01)


def rates_of(schedule: str, **options: Any) -> list[tuple[float, ...]]:
    """The rates of three steps, whose optimizer is given another rate before each. The last are read at the end."""
    case, found = Case("layered", schedule, 3, 4), []
    with penstock.Pipeline(case.build(), **{**case.options, "optimizer": models.momentum, **options}) as pipe:
        for number, batch in enumerate(case.batches[:3]):
            for group in pipe.optimizers[0].param_groups:
                group["lr"] = 0.1 * number
            result = pipe.step(*batch)
            found.append(result.lr)
            if number == 0:
                first = result
        pipe.drain()
        return [*found, first.lr]


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_all_ranks_have_the_rates_of_the_loop_also_before_their_first_update(pool: Pool, schedule: str) -> None:
    for rank, rates in enumerate(pool.run(3, rates_of, schedule)):
        steps = [rate for (rate,) in rates[:3]]
        assert steps[0] == 0.0, rank
        if schedule == "1f1b-flush":
            assert (steps, rates[3]) == ([0.0, 0.1, 0.2], (0.0,))


class Sharp(torch.optim.SGD):
    """Computes the loss again, as sharpness-aware minimization does; `missing` raises where it cannot."""

    def __init__(self, parameters: Any, missing: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.missing = missing

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        match self.missing:
            case "assertion":
                assert closure is not None
            case "message":
                assert callable(closure), "Sharpness Aware Minimization requires closure, but it was not provided"
            case "error":
                raise RuntimeError("LBFGS-like: pass a closure")
            case "call":
                return closure()
        raise ValueError("something else")


@pytest.mark.parametrize("missing", ["assertion", "message", "error", "call"])
def test_an_optimizer_that_wants_a_closure_is_refused_as_lbfgs_is(missing: str) -> None:
    x = torch.ones(2, 3)
    pipe = penstock.Pipeline(nn.Linear(3, 3), (x,), nn.MSELoss(), lambda p: Sharp(p, missing), stages=1)
    with pipe, pytest.raises(penstock.PenstockError, match=r"found Sharp, which computes the loss again by a closure"):
        pipe.step(x, x)


def test_another_error_of_an_optimizer_stays_its_own() -> None:
    x = torch.ones(2, 3)
    pipe = penstock.Pipeline(nn.Linear(3, 3), (x,), nn.MSELoss(), lambda p: Sharp(p, "none"), stages=1)
    with pipe, pytest.raises(ValueError, match="something else"):
        pipe.step(x, x)


def test_a_plain_loop_with_the_same_scheduler_gives_the_same_numbers() -> None:
    case = Case("perceptron", "gpipe", 2, 1)
    model, options = case.build(), case.options
    optimizer = models.momentum(list(model.parameters()))
    scheduler = warm(optimizer)
    expected = train_by_loop(
        model, case.batches, options["loss_fn"], lambda parameters: optimizer, after_step=scheduler.step
    )

    assert run_pipeline(case, optimizer=models.momentum, lr_scheduler=warm).losses == expected.losses


def test_parameters_are_named_as_in_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    seen: list[penstock.NamedParameters] = []

    def make(params: penstock.NamedParameters) -> torch.optim.Optimizer:
        seen.append(params)
        return torch.optim.SGD(params, lr=0.1)

    penstock.Pipeline(model, sample=(torch.randn(2, 3),), loss_fn=nn.functional.mse_loss, optimizer=make, stages=2)
    (params,) = seen

    assert params.names == ("0.weight", "1.weight", "1.bias")
    assert [name for name, p in params.items() if p is model[1].bias] == ["1.bias"]
    assert params.where(lambda name, p: p.ndim > 1).names == ("0.weight", "1.weight")
    assert list(params) == [model[0].weight, model[1].weight, model[1].bias]
