"""Means over tokens, and numbers that `loss_fn` returns beside the loss: those of the whole batch, on every rank."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import penstock
from support import models
from support.jobs.loss_weight_jobs import BATCHES, build, loss_fn, run_weighted, tokens, weighted_options
from support.processes import Pool
from support.training import Case, train_by_loop, with_accuracy

SCHEDULES = ("gpipe", "1f1b-flush", "pipedream", "2bw")


@pytest.mark.parametrize("microbatches", [3, 6])
def test_the_numbers_are_those_of_the_whole_batch(microbatches: int) -> None:
    model = build()
    losses = train_by_loop(model, BATCHES, loss_fn, models.momentum).losses
    found = run_weighted(**weighted_options("1f1b-flush", 3, microbatches))
    unweighted = run_weighted(**{**weighted_options("1f1b-flush", 3, microbatches), "loss_weight": None})

    # To rounding, since a batch in parts is summed in another order.
    assert found.losses == pytest.approx(losses, rel=1e-12)
    assert unweighted.losses != pytest.approx(losses, rel=1e-3)
    assert found.evaluated == pytest.approx(float(loss_fn(model(BATCHES[0][0]), BATCHES[0][1]).detach()), rel=1e-12)


@pytest.mark.parametrize(
    ("weigh", "said"),
    [
        (lambda y: -1, "expected one number of at least 0"),
        (lambda y: y, "expected one number of at least 0"),
        (lambda y: float("nan"), "expected one number of at least 0"),
        (lambda y: 0, "is 0 for every microbatch"),
    ],
)
def test_a_wrong_weight_is_explained(weigh: Any, said: str) -> None:
    pipe = penstock.Pipeline(build(), **{**weighted_options("gpipe", 2, 3), "loss_weight": weigh})
    with pytest.raises(penstock.PenstockError, match=said):
        pipe.step(*BATCHES[0])
    assert tokens(BATCHES[0][1]) > 0


def losses_and_metrics(case: Case) -> list[tuple[float, dict[str, float]]]:
    """The losses and metrics of every step, and of an evaluation."""
    pipe = penstock.Pipeline(case.build(), **{**case.options, "loss_fn": with_accuracy})
    results = [*(pipe.step(x, y) for x, y in case.batches), pipe.evaluate(*case.batches[0])]
    found = [(float(result.loss), dict(result.metrics)) for result in results]
    pipe.close()
    return found


def expected(x: Tensor, y: Tensor) -> dict[str, float]:
    """The metrics of the untrained model, on a whole batch."""
    output = models.SUBJECTS["perceptron"].build()(x)
    return {"accuracy": float((output.argmax(-1) == y).double().mean()), "entropy": F.cross_entropy(output, y).item()}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", [None, True])
def test_metrics_are_means_over_the_samples(schedule: str, recompute: object) -> None:
    case = Case("perceptron", schedule, 2, 3)
    pipe = penstock.Pipeline(case.build(), **{**case.options, "loss_fn": with_accuracy}, recompute=recompute)
    x, y = case.batches[0]
    for samples in (13, 16):  # the first one does not divide by three
        result = pipe.evaluate(x[:samples], y[:samples])

        assert dict(result.metrics) == pytest.approx(expected(x[:samples], y[:samples]), rel=1e-12)
    if schedule != "pipedream":  # under which later microbatches see updated weights
        assert dict(pipe.step(x, y).metrics) == pytest.approx(expected(x, y), rel=1e-12)


def test_metrics_change_no_number() -> None:
    case = Case("layered", "2bw", 3, 4)
    plain = penstock.Pipeline(case.build(), **case.options)
    measured = penstock.Pipeline(case.build(), **{**case.options, "loss_fn": with_accuracy})
    for x, y in case.batches:
        assert float(plain.step(x, y).loss) == float(measured.step(x, y).loss)


@pytest.mark.parametrize("replicas", [(), (1, 2)])
def test_metrics_are_on_every_rank(pool: Pool, replicas: tuple[int, ...]) -> None:
    case = Case("layered", "1f1b-flush", 2, 4, replicas=replicas)
    here = losses_and_metrics(case)
    for found in pool.run(case.processes, losses_and_metrics, case):
        assert found == here


def test_reading_waits_and_shows() -> None:
    case = Case("layered", "gpipe", 2, 2)
    metrics = (
        penstock.Pipeline(case.build(), **{**case.options, "loss_fn": with_accuracy}).step(*case.batches[0]).metrics
    )

    assert list(metrics) == ["accuracy", "entropy"]
    assert len(metrics) == 2
    assert repr(metrics) == f"Metrics({dict(metrics)})"
    with pytest.raises(KeyError):
        metrics[""]


def growing() -> Any:
    """Returns one more metric with every call."""
    calls: list[None] = []

    def loss_fn(output: Tensor, y: Tensor) -> tuple[Tensor, dict[str, float]]:
        calls.append(None)
        return F.cross_entropy(output, y), {str(index): 0.0 for index in range(len(calls))}

    return loss_fn


REFUSALS = {
    "no dict": (lambda output, y: (F.cross_entropy(output, y), 1.0), "returned 1.0 beside the loss: expected a dict"),
    "a vector": (lambda output, y: (F.cross_entropy(output, y), {"v": torch.ones(2)}), r"metric 'v' of shape \(2,\)"),
    "no name": (lambda output, y: (F.cross_entropy(output, y), {"": 1.0}), "expected a name of one line"),
    "other names": (growing(), "return the same names for every microbatch"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_metrics_are_explained(name: str) -> None:
    case = Case("layered", "gpipe", 2, 2)
    loss_fn, said = REFUSALS[name]
    pipe = penstock.Pipeline(case.build(), **{**case.options, "loss_fn": loss_fn})
    with pytest.raises(penstock.PenstockError, match=said):
        pipe.step(*case.batches[0])
