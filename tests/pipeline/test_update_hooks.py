"""Hooks at the update: corrections of staleness and averages equal the oracle, and the formulas written out by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import penstock
from convergence.corrections import ErrorFeedback, LookAhead
from support import models
from support.jobs.hook_jobs import HOOKED, run_hooked
from support.training import Case, Outcome, assert_equal, run_pipeline, run_reference, train_by_loop


@pytest.mark.parametrize("recipe", ["prediction", "clipped"])
def test_a_schedule_that_flushes_needs_no_correction(recipe: str) -> None:
    case = Case("layered", "gpipe", 3, 4)
    plain = {key: value for key, value in HOOKED[recipe].items() if key != "update_hooks"}

    assert_equal(run_pipeline(case, **plain), run_hooked(case, recipe))


Weights = list[Tensor]
Correct = Callable[[list[Weights], Weights], tuple[Weights, Weights]]
"""From the weights so far (one per update) and the optimizer's step, the new weights and what forwards read of them."""


def delayed_by_hand(optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], correct: Correct) -> Weights:
    """PipeDream-2BW written out, with a correction: the final weights."""
    subject = models.SUBJECTS["perceptron"]
    model = subject.build()
    parameters = list(model.parameters())
    stepped = [nn.Parameter(p.detach().clone()) for p in parameters]
    made = optimizer(stepped)
    weights, read = [[p.detach().clone() for p in parameters]], [[p.detach().clone() for p in parameters]]
    for number, (x, y) in enumerate(subject.batches):
        for parameter, value in zip(parameters, read[max(number - 1, 0)], strict=True):
            parameter.data = value.clone()
            parameter.grad = None
        for part, target in zip(x.split(4), y.split(4), strict=True):
            (F.cross_entropy(model(part), target) * 0.25).backward()
        for own, value, parameter in zip(stepped, weights[-1], parameters, strict=True):
            own.data = value.clone()
            own.grad = parameter.grad
        made.step()
        new, seen = correct(weights, [p.detach().clone() for p in stepped])
        weights.append(new)
        read.append(seen)
    return weights[-1]


def final_weights(optimizer: Any, hooks: Sequence[penstock.UpdateHook]) -> Weights:
    options = {"update_hooks": hooks, "optimizer": optimizer}
    state = run_pipeline(Case("perceptron", "2bw", 2, 4), **options).state
    return [state[name] for name, _ in models.SUBJECTS["perceptron"].build().named_parameters()]


def assert_close(expected: Weights, actual: Weights) -> None:
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("optimizer", [models.momentum, models.adamw])
def test_prediction_reads_one_step_ahead(optimizer: Any) -> None:
    def ahead(weights: list[Weights], new: Weights) -> tuple[Weights, Weights]:
        return new, [2 * after - before for before, after in zip(weights[-1], new, strict=True)]

    assert_close(delayed_by_hand(optimizer, ahead), final_weights(optimizer, [penstock.WeightPrediction()]))


def test_feedback_adds_the_difference_of_two_steps() -> None:
    steps: list[Weights] = []

    def feed(weights: list[Weights], new: Weights) -> tuple[Weights, Weights]:
        steps.append([after - before for before, after in zip(weights[-1], new, strict=True)])
        if len(steps) > 1:
            new = [w + 0.7 * (u - old) for w, u, old in zip(new, steps[-1], steps[-2], strict=True)]
        return new, new

    assert_close(delayed_by_hand(models.momentum, feed), final_weights(models.momentum, [ErrorFeedback(0.7)]))


def test_look_ahead_is_nesterovs_method_with_discounted_steps() -> None:
    """Without a delay, SGD with Nesterov momentum and a smaller rate is the same method."""
    case = Case("perceptron", "gpipe", 2, 4)
    expected = run_pipeline(
        case, optimizer=lambda params: torch.optim.SGD(params, lr=0.05 * 0.1, momentum=0.9, nesterov=True)
    )
    actual = run_pipeline(case, optimizer=models.plain, update_hooks=[LookAhead(0.9)])

    assert_close(list(expected.state.values()), list(actual.state.values()))


AVERAGES: dict[float | None, Callable[[nn.Module], AveragedModel]] = {
    0.9: lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    0.25: lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.25)),
    0.0: lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.0)),
    None: AveragedModel,
}


class Sometimes(nn.Module):
    """Has one weight that some batches give no gradient, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.extra = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.extra(x) if x[0, 0] > 0 else x)


def averaged_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Sometimes(), nn.Linear(4, 4), Sometimes(), nn.Linear(4, 4)).double()
    if kind == "tied":
        model[2].weight = model[0].weight
    if kind == "frozen":
        model[2].weight.requires_grad_(False)
    return model.float() if kind == "float32" else model


@pytest.mark.sampled(8)
@pytest.mark.parametrize("decay", AVERAGES)
@pytest.mark.parametrize("kind", ["plain", "tied", "frozen", "float32"])
def test_averages_are_those_of_pytorch(kind: str, decay: float | None) -> None:
    """Some parameters have no gradient in some updates, others are frozen or shared; buffers are the model's."""
    model, twin = averaged_model(kind), averaged_model(kind)
    dtype = model[0].weight.dtype
    batches = [(torch.randn(6, 4, dtype=dtype), torch.randn(6, 4, dtype=dtype)) for _ in range(6)]
    averaged = AVERAGES[decay](model)
    missing: list[bool] = []

    def after_step() -> None:
        missing.append(model[1].extra.weight.grad is None)
        averaged.update_parameters(model)

    train_by_loop(model, batches, F.mse_loss, models.adamw, after_step=after_step)
    assert {*missing} == {True, False}, "some updates have no gradient of it"

    pipe = penstock.Pipeline(
        twin, (batches[0][0],), F.mse_loss, models.adamw, stages=2, update_hooks=[penstock.WeightAverage(decay)]
    )
    assert all(torch.equal(average, twin.get_parameter(name)) for name, average in pipe.averages().items())
    for x, y in batches:
        pipe.step(x, y)
    averages = pipe.averages()

    assert averages.keys() == {name for name, p in twin.named_parameters() if p.requires_grad}
    for name, average in averages.items():
        assert torch.equal(average, averaged.module.get_parameter(name)), name
    with pipe.averaged():
        found = pipe.full_state_dict()
    for name, tensor in averaged.module.state_dict().items():
        assert torch.equal(tensor, found[name]), name


class _Noted(penstock.UpdateHook):
    """The weights after every update, by name."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {}

    def after_step(self, update: penstock.WeightUpdate) -> None:
        self.seen.setdefault(update.name, []).append(update.after.clone())


@pytest.mark.parametrize("decay", [0.7, None])
@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_averages_without_a_flush_follow_every_update(schedule: str, decay: float | None) -> None:
    case, noted = Case("layered", schedule, 3, 4), _Noted()
    pipe = penstock.Pipeline(case.build(), **case.options, update_hooks=[noted, penstock.WeightAverage(decay)])
    for x, y in case.batches:
        pipe.step(x, y)
    for name, average in pipe.averages().items():
        one = nn.Linear(1, 1, bias=False)
        one.weight = nn.Parameter(noted.seen[name][0])
        expected = AveragedModel(one, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay))
        for weights in noted.seen[name]:
            one.weight.data = weights
            expected.update_parameters(one)

        assert torch.equal(average, expected.module.weight), name


def test_evaluation_with_averages_leaves_the_weights_as_they_were() -> None:
    case = Case("layered", "2bw", 3, 4)
    pipe = penstock.Pipeline(case.build(), **case.options, update_hooks=[penstock.WeightAverage(0.5)])
    x, y = case.batches[0]
    pipe.step(x, y)
    pipe.step(*case.batches[1])
    before = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    plain = float(pipe.evaluate(x, y).loss)
    with pipe.averaged():
        averaged = float(pipe.evaluate(x, y).loss)
        state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    alone = case.build()
    alone.load_state_dict(state)

    assert averaged != plain
    assert averaged == pytest.approx(F.cross_entropy(alone.eval()(x), y).item(), rel=1e-12)
    for name, tensor in pipe.state_dict()["model"].items():
        assert torch.equal(before[name], tensor), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", ["prediction", "several", "own"])
@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_training_goes_on_from_a_checkpoint_of_other_stages(recipe: str, schedule: str, tmp_path: Any) -> None:
    """Under 2bw, whose numbers do not depend on the stages; under pipedream on as many."""
    case = Case("layered", schedule, 3, 4)
    other = Case("layered", schedule, 3 if schedule == "pipedream" else 2, 4)
    whole = penstock.Pipeline(case.build(), **case.options, **HOOKED[recipe])
    resumed = penstock.Pipeline(case.build(), **other.options, **HOOKED[recipe])
    for x, y in case.batches[:2]:
        whole.step(x, y)
    whole.save(tmp_path / "state")
    # What it has seen so far is forgotten.
    resumed.step(*case.batches[3])
    resumed.load(tmp_path / "state")
    for x, y in case.batches[2:]:
        assert float(whole.step(x, y).loss) == float(resumed.step(x, y).loss)
    if recipe == "several":
        one, two = whole.averages(), resumed.averages()
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_frozen_parameters_are_left_alone() -> None:
    case = Case("layered", "2bw", 3, 4)
    model = case.build()
    frozen = [p for number, p in enumerate(model.parameters()) if number % 2]
    for parameter in frozen:
        parameter.requires_grad_(False)
    seen: set[str] = set()

    class Noting(penstock.UpdateHook):
        def after_step(self, update: penstock.WeightUpdate) -> None:
            seen.add(update.name)

    pipe = penstock.Pipeline(model, **case.options, update_hooks=[Noting()])
    pipe.step(*case.batches[0])
    pipe.drain()

    assert seen == {name for name, p in model.named_parameters() if p.requires_grad}


def test_averages_that_no_hook_keeps_are_refused() -> None:
    case = Case("layered", "gpipe", 2, 4)
    pipe = penstock.Pipeline(case.build(), **case.options)
    with pytest.raises(penstock.PenstockError, match=r"expected a penstock\.WeightAverage"):
        pipe.averages()


class _Wrong(penstock.UpdateHook):
    """Does `after_step` in every update, or predicts what `prediction` returns."""

    def __init__(self, prediction: Any = None, change: Any = None) -> None:
        self.prediction, self.change = prediction, change

    def after_step(self, update: penstock.WeightUpdate) -> None:
        if self.change is not None:
            self.change(update)

    def predicts(self, delay: int) -> bool:
        return self.prediction is not None

    def predict(self, update: penstock.WeightUpdate) -> Any:
        return self.prediction(update)


def replace_memory(tensor: Tensor) -> None:
    tensor.data = torch.zeros_like(tensor)


WRONG = {
    "one row": (_Wrong(lambda u: u.after[:1]), r"_Wrong.predict: expected a tensor like update.after .*\(1, "),
    "another type": (_Wrong(lambda u: u.after.float()), r"_Wrong.predict: .* found .* torch.float32"),
    "nothing": (_Wrong(lambda u: None), r"_Wrong.predict: .* found nothing"),
    "a number": (_Wrong(lambda u: 3), r"_Wrong.predict: .* found 3"),
    "a prediction in place": (_Wrong(lambda u: u.after.mul_(2)), r"_Wrong changed update.after of"),
    "before, predicting": (_Wrong(lambda u: u.before.add_(u.after)), r"_Wrong changed update.before of"),
    "before": (_Wrong(change=lambda u: u.before.zero_()), r"_Wrong changed update.before of"),
    "another form": (_Wrong(change=lambda u: u.after.resize_(1)), r"_Wrong changed update.after of"),
    "other memory": (_Wrong(change=lambda u: replace_memory(u.after)), r"_Wrong changed update.after of"),
    "other memory before": (_Wrong(change=lambda u: replace_memory(u.before)), r"_Wrong changed update.before of"),
}


@pytest.mark.parametrize("run", [run_pipeline, run_reference])
@pytest.mark.parametrize("name", WRONG)
def test_a_hook_that_returns_or_changes_something_else_is_refused(name: str, run: Callable[..., Outcome]) -> None:
    hook, said = WRONG[name]
    with pytest.raises(penstock.PenstockError, match=said):
        run(Case("layered", "2bw", 2, 4), update_hooks=hook)


def test_a_hook_may_write_after_and_predict_anew() -> None:
    hook = _Wrong(lambda u: u.after * 1.1, lambda u: u.after.mul_(0.9))
    case = Case("layered", "2bw", 2, 4)

    assert_equal(run_reference(case, update_hooks=hook), run_pipeline(case, update_hooks=hook))
