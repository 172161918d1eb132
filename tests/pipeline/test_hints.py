"""Hints in the log: one for each slip that is no error, and none where nothing slipped. And the rates of a step."""

import gc
import logging
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

import penstock


def make(schedule: str = "gpipe", model: nn.Module | None = None, **changes: Any) -> penstock.Pipeline:
    options: dict[str, Any] = {
        "sample": (torch.randn(2, 6),),
        "loss_fn": functional.mse_loss,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "schedule": schedule,
        "stages": 2,
        "microbatches": 2,
    }
    return penstock.Pipeline(model or build(), **{**options, **changes})


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


X, Y = torch.randn(4, 6), torch.randn(4, 6)


def hints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_training_without_slips_has_no_hint(caplog: pytest.LogCaptureFixture) -> None:
    pipe = make("2bw")
    pipe.step(X, Y)
    pipe.drain()
    pipe.close()

    assert hints(caplog) == []


def test_a_model_in_evaluation_mode_has_a_hint(caplog: pytest.LogCaptureFixture) -> None:
    make(model=build().eval()).close()

    (hint,) = hints(caplog)
    assert "evaluation mode" in hint
    assert "model.train()" in hint


def test_a_forgotten_pipeline_that_ends_in_flight_has_one_hint(caplog: pytest.LogCaptureFixture) -> None:
    pipe = make("pipedream", microbatches=1)
    pipe.step(X, Y)
    del pipe
    gc.collect()

    (hint,) = hints(caplog)
    assert "microbatches in flight" in hint
    assert "pipe.drain()" in hint


def test_close_drains_unless_an_error_is_on_its_way(caplog: pytest.LogCaptureFixture) -> None:
    closed, left, failed = (make("pipedream", microbatches=1) for _ in range(3))
    for pipe in (closed, left, failed):
        pipe.step(X, Y)
    with left:
        pass
    closed.close()
    closed.close()
    before = [parameter.detach().clone() for parameter in failed.parameters()]
    with pytest.raises(KeyError), closing(failed):
        raise KeyError("an error of the script")

    assert all(map(torch.equal, closed.parameters(), left.parameters()))
    assert all(map(torch.equal, failed.parameters(), before))
    assert not all(map(torch.equal, failed.parameters(), closed.parameters()))
    # The third one.
    (hint,) = hints(caplog)
    assert "microbatches in flight" in hint


def test_a_pipeline_that_failed_has_no_hint_to_drain(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="of the user"), make("pipedream", microbatches=1) as pipe:
        pipe.step(X, Y)
        raise ValueError("of the user")

    assert hints(caplog) == []


def test_the_log_says_how_many_updates_a_step_makes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="penstock")
    for schedule in ("gpipe", "2bw", "pipedream"):
        with make(schedule):
            pass

    said = [record.getMessage() for record in caplog.records if "updates per step" in record.getMessage()]
    assert said == [
        "updates per step: 2 under pipedream, one for 1 microbatch(es), so learning rates and schedulers count more of "
        "them than steps. Give microbatches=1, or choose a schedule that flushes, for one update per step"
    ]


def test_a_result_has_the_rates_of_its_update() -> None:
    def groups(parameters: penstock.NamedParameters) -> torch.optim.Optimizer:
        biases = parameters.where(lambda name, _: "bias" in name)
        weights = parameters.where(lambda name, _: "bias" not in name)
        made: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "lr": 1.0}]
        return torch.optim.SGD(made, lr=0.5)

    def halved(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda update: 0.5**update)

    with make(optimizer=groups, lr_scheduler=halved) as pipe:
        results = [pipe.step(X, Y) for _ in range(3)]

        assert [result.lr for result in results] == [(0.5, 1.0), (0.25, 0.5), (0.125, 0.25)]
        assert pipe.evaluate(X, Y).lr == ()
    with make("pipedream", optimizer=groups, lr_scheduler=halved) as pipe:
        # Two updates in a step, of which the first stage's are behind those of the last one.
        assert pipe.step(X, Y).lr in ((0.25, 0.5), (0.5, 1.0))


def test_a_rate_that_is_a_tensor_is_kept_as_it_was() -> None:
    rate = torch.tensor(0.5)
    with make(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate)) as pipe:
        result = pipe.step(X, Y)
        rate.fill_(3.0)

        assert result.lr == (0.5,)


def test_a_ragged_last_batch_has_a_hint_where_batches_are_shuffled(caplog: pytest.LogCaptureFixture) -> None:
    data: Any = list(range(10))
    penstock.loader(data, 4)
    penstock.loader(data, 5, shuffle=True)
    penstock.loader(data, 4, shuffle=True, drop_last=True)
    penstock.loader(data, 4, shuffle=True, microbatches=2)
    assert hints(caplog) == []

    penstock.loader(data, 4, shuffle=True)

    (hint,) = hints(caplog)
    assert "2 of 4 samples" in hint


class Wrapper(torch.optim.Optimizer):
    """Shares the groups of another optimizer, as Accelerate's does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups = inner.param_groups


def test_an_optimizer_that_steps_nothing_has_a_hint(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    mine = torch.optim.AdamW(model.parameters())
    pipe = make(model=model)
    pipe.step(X, Y)
    pipe.step(X, Y)

    (hint,) = hints(caplog)
    assert "(AdamW)" in hint
    assert "pipe.optimizer.param_groups" in hint
    assert all(parameter.grad is None for group in mine.param_groups for parameter in group["params"])


def test_optimizers_of_other_models_and_pipelines_have_no_hint(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    earlier, other = make(model=model), torch.optim.SGD(build().parameters(), lr=0.1)
    earlier.close()
    pipe = make(model=model)
    assert pipe.optimizer is not None
    around = Wrapper(pipe.optimizer)
    pipe.step(X, Y)

    assert earlier.optimizer is not None
    assert other.param_groups is not around.param_groups
    assert hints(caplog) == []
