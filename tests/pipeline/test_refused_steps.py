"""Steps that would train nothing, or other weights than the user means, are refused; the pipeline goes on after it."""

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

import penstock
from penstock.training.scaling import LossScale
from support.models import sgd

X, Y = torch.randn(8, 4), torch.randn(8, 4)


def build(model: nn.Module | None = None, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    made = model or nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4))
    arguments = {"loss_fn": F.mse_loss, "optimizer": sgd, "stages": 2, "microbatches": 2, **options}
    return penstock.Pipeline(made, sample=(X[:4],), **arguments)


def weights(pipe: penstock.Pipeline) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in pipe.parameters()]


def assert_trains(pipe: penstock.Pipeline) -> None:
    before = weights(pipe)
    pipe.step(X, Y)
    pipe.drain()
    assert not all(torch.equal(old, new) for old, new in zip(before, weights(pipe), strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_a_step_without_gradients(mode: Callable[[], AbstractContextManager[None]], schedule: str) -> None:
    pipe = build(schedule=schedule)
    before = weights(pipe)
    with mode(), pytest.raises(penstock.PenstockError, match=rf"under torch.{mode.__name__}\(\): expected gradients"):
        pipe.step(X, Y)

    assert all(torch.equal(old, new) for old, new in zip(before, weights(pipe), strict=True))
    assert_trains(pipe)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda output, target: F.mse_loss(output.detach(), target), "does not depend on the model's output"),
        (lambda output, target: (output > target).sum(), "a loss of torch.int64 in a step"),
        (lambda output, target: F.mse_loss(output, target) * 1j, r"a loss of torch.complex\d+ in a step"),
    ],
)
def test_a_loss_without_gradients(loss_fn: Any, message: str) -> None:
    with pytest.raises(penstock.PenstockError, match=message):
        build(loss_fn=loss_fn).step(X, Y)


def test_a_model_without_trained_parameters_evaluates_and_does_not_step() -> None:
    frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    for pipe in (build(frozen), build(optimizer=lambda parameters: [])):
        with pytest.raises(penstock.PenstockError, match="would train nothing: expected an optimizer"):
            pipe.step(X, Y)
        assert float(pipe.evaluate(X, Y).loss) > 0


def test_an_infinite_loss_scale() -> None:
    for wrong in (float("inf"), float("nan")):
        with pytest.raises(penstock.PenstockError, match="finite"):
            build(loss_scale=wrong)
        with pytest.raises(penstock.PenstockError, match="expected a finite number"):
            LossScale(growth=wrong)


def test_a_step_within_a_step() -> None:
    errors = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        try:
            pipe.step(X, Y)
        except penstock.PenstockError as error:
            errors.append(str(error))
        return F.mse_loss(output, target)

    pipe = build(loss_fn=loss_fn, check="off")
    assert_trains(pipe)
    assert len(errors) == 2
    assert "already in use (in a step): expected one call at a time" in errors[0]


def test_a_step_from_another_thread() -> None:
    entered, refused = threading.Event(), threading.Event()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        entered.set()
        assert refused.wait(60)
        return F.mse_loss(output, target)

    pipe = build(loss_fn=loss_fn)
    thread = threading.Thread(target=pipe.step, args=(X, Y))
    thread.start()
    assert entered.wait(60)
    for call in (lambda: pipe.step(X, Y), pipe.drain, pipe.state_dict, lambda: pipe.predict(X)):
        with pytest.raises(penstock.PenstockError, match="from another thread"):
            call()
    refused.set()
    thread.join()
    assert_trains(pipe)


def test_a_step_among_averages() -> None:
    pipe = build(update_hooks=[penstock.WeightAverage(0.5)])
    assert_trains(pipe)
    before = weights(pipe)
    with pipe.averaged():
        assert float(pipe.evaluate(X, Y).loss) > 0
        with pytest.raises(penstock.PenstockError, match=r"inside of averaged\(\)"):
            pipe.step(X, Y)

    assert all(torch.equal(old, new) for old, new in zip(before, weights(pipe), strict=True))
    assert_trains(pipe)


def test_averages_are_not_saved_or_loaded_over(tmp_path: Path) -> None:
    pipe = build(update_hooks=[penstock.WeightAverage(0.5)])
    assert_trains(pipe)
    saved, state = pipe.save(tmp_path / "run"), pipe.state_dict()
    with pipe.averaged():
        for call in (
            lambda: pipe.save(tmp_path / "run"),
            lambda: pipe.save(tmp_path / "run", wait=False),
            lambda: pipe.load(saved),
            lambda: pipe.load_state_dict(state),
        ):
            with pytest.raises(penstock.PenstockError, match=r"was called inside of averaged\(\)"):
                call()
        pipe.save_weights(tmp_path / "averages")
    pipe.load(saved)

    assert_close(load_file(tmp_path / "averages" / "model.safetensors"), dict(pipe.averages()))
    assert_trains(pipe)


def test_calls_after_close() -> None:
    pipe = build()
    pipe.close()
    pipe.close()
    for call in (
        lambda: pipe.step(X, Y),
        lambda: pipe.evaluate(X, Y),
        lambda: pipe.predict(X),
        pipe.drain,
        pipe.state_dict,
        pipe.timeline,
    ):
        with pytest.raises(penstock.PenstockError, match="this pipeline was closed"):
            call()


def test_the_older_of_two_pipelines_on_a_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    older = build(model)
    build(copy.deepcopy(model))
    assert_trains(older)
    newer = build(model)
    with pytest.raises(penstock.PenstockError, match="another Pipeline was built on this model"):
        older.step(X, Y)
    assert_trains(newer)


@pytest.mark.parametrize("schedule", ["1f1b-flush", "pipedream", "2bw"])
def test_batches_that_numpy_overwrites_after_the_step(schedule: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    batches = [(torch.randn(8, 4).double(), torch.randn(8, 4).double()) for _ in range(5)]
    options = {"loss_fn": F.mse_loss, "optimizer": sgd, "schedule": schedule, "stages": 2, "microbatches": 2}
    expected = penstock.reference_train(model, batches, sample=(batches[0][0][:4],), **options)  # type: ignore[arg-type]
    pipe = penstock.Pipeline(model, sample=(batches[0][0][:4],), **options)  # type: ignore[arg-type]
    inputs, target = numpy.empty((8, 4)), torch.empty(8, 4).double()
    for x, y in batches:
        inputs[:] = x.numpy()
        target.numpy()[:] = y.numpy()
        pipe.step(torch.from_numpy(inputs), target)
        inputs[:] = numpy.nan
    state = pipe.state_dict()["model"]

    assert all(torch.equal(tensor, state[name]) for name, tensor in expected.state.items())


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_modes_that_change_after_the_building_count_as_in_a_plain_loop(schedule: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 4))
    pipe = build(model, schedule=schedule)
    pipe.step(X, Y)
    pipe.drain()
    # Without dropout and with the statistics so far a step has the loss of an evaluation.
    model.eval()
    expected = float(pipe.evaluate(X, Y).loss)
    assert float(pipe.step(X, Y).loss) == pytest.approx(expected, rel=1e-6)
    pipe.drain()
    model.train()
    for module in model:
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain = copy.deepcopy(model)
    losses = [float(F.mse_loss(plain(x), y).detach()) for x, y in zip(X.chunk(2), Y.chunk(2), strict=True)]
    assert float(pipe.step(X, Y).loss) == pytest.approx(sum(losses) / 2, rel=1e-6)
    pipe.drain()
    model.requires_grad_(False)
    with pytest.raises(penstock.PenstockError, match="requires_grad is False and was True"):
        pipe.step(X, Y)


class DropsOutside(nn.Module):
    """Dropout in the code between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.first(x), 0.5, self.training))


def test_a_mode_that_traced_code_would_not_follow() -> None:
    model = DropsOutside()
    pipe = build(model)
    model.eval()
    with pytest.raises(penstock.PenstockError, match=r"^training was True and is False .* Call model.train\(True\)"):
        pipe.step(X, Y)
    assert float(pipe.evaluate(X, Y).loss) > 0
    model.train()
    assert_trains(pipe)
