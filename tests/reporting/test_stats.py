"""What a pipeline says of its speed: its numbers agree with each other, and steps stay as they are."""

from dataclasses import fields, replace
from typing import Any

import pytest

import penstock
from penstock.values.plans import Prediction
from support.jobs.stats_jobs import count, stats_of_all_ranks
from support.processes import Pool
from support.training import Case, run_pipeline

CASE = Case("perceptron", "1f1b-flush", 2, 4)


def trained(case: Case = CASE, **options: Any) -> penstock.Pipeline:
    pipe = penstock.Pipeline(case.build(), **{**case.options, **options})
    for x, y in case.batches[:3]:
        pipe.step(x, y)
    return pipe


def test_rates_follow_from_the_seconds_of_a_step() -> None:
    stats = trained(loss_weight=count).stats()
    samples = len(CASE.batches[0][0])
    assert stats.step_seconds is not None

    assert stats.steps == 2
    assert stats.step_seconds > 0
    assert stats.samples_per_second == pytest.approx(samples / stats.step_seconds)
    assert stats.tokens_per_second == pytest.approx(3 * samples / stats.step_seconds)
    assert (stats.idle_share, stats.bubble, stats.peak_memory_bytes) == (None, None, None)
    assert stats.predicted_bubble == pytest.approx(1 / 5)


def test_utilization_follows_from_what_is_given() -> None:
    stats = trained().stats(tokens_per_sample=7, flops_per_sample=100, peak_flops=1e6)
    rate = stats.samples_per_second
    assert rate is not None

    assert stats.tokens_per_second == pytest.approx(7 * rate)
    assert stats.flops_per_second == pytest.approx(100 * rate)
    assert stats.flops_utilization == pytest.approx(100 * rate / 1e6)


def test_operations_are_counted_by_default() -> None:
    stats = trained().stats()
    assert stats.flops_per_second is not None
    assert stats.samples_per_second is not None

    # Seven layers of 6 by 6 and one of 6 by 3.
    assert stats.flops_per_second / stats.samples_per_second == pytest.approx(3 * 2 * (7 * 36 + 18))
    assert stats.flops_utilization is None
    assert stats.tokens_per_second is None


def test_a_dict_has_the_numbers_that_are_known() -> None:
    stats = trained().stats()
    known = {field.name for field in fields(stats) if getattr(stats, field.name) is not None}

    assert stats.as_dict() == {name: getattr(stats, name) for name in known}
    assert known >= {"steps", "step_seconds", "samples_per_second", "flops_per_second", "predicted_bubble"}
    assert "bubble" not in known


def test_before_the_first_step_there_are_no_times() -> None:
    pipe = penstock.Pipeline(CASE.build(), **CASE.options)

    assert pipe.stats().as_dict() == {"steps": 0, "predicted_bubble": pytest.approx(1 / 5)}


def test_an_evaluation_between_steps_is_no_step() -> None:
    pipe = penstock.Pipeline(CASE.build(), **CASE.options)
    x, y = CASE.batches[0]
    for _ in range(2):
        pipe.step(x, y)
        pipe.evaluate(x, y)

    # Neither step is followed by one, so both count from beginning to end.
    assert pipe.stats().steps == 2
    pipe.step(x, y)
    pipe.step(x, y)
    assert pipe.stats().steps == 1


def test_stats_change_no_number() -> None:
    case = Case("normalized", "2bw", 2, 2)
    pipe = penstock.Pipeline(case.build(), **case.options)
    losses = []
    for x, y in case.batches:
        losses.append(float(pipe.step(x, y).loss))
        pipe.stats()
    pipe.drain()
    expected = run_pipeline(case)

    assert tuple(losses) == expected.losses
    assert all(tensor.equal(expected.state[name]) for name, tensor in pipe.state_dict()["model"].items())


def test_a_plan_with_a_prediction_keeps_its_bubble() -> None:
    predicted = Prediction(1.0, 8.0, 0.25, (0.0, 0.0), 0.375, "")
    plan = replace(CASE.options["plan"], predicted=predicted)

    assert trained(plan=plan).stats().predicted_bubble == 0.375


@pytest.mark.parametrize("name", ["tokens_per_sample", "flops_per_sample", "peak_flops"])
@pytest.mark.parametrize("number", [0, -1.0, float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused(name: str, number: float) -> None:
    pipe = penstock.Pipeline(CASE.build(), **CASE.options)
    with pytest.raises(penstock.PenstockError, match=f"{name}=.*expected a finite number above 0"):
        pipe.stats(**{name: number})  # type: ignore[arg-type]


@pytest.mark.processes
def test_all_ranks_are_collective(pool: Pool) -> None:
    found = pool.run(2, stats_of_all_ranks, CASE)
    alone, together = zip(*found, strict=True)
    shares = [stats.idle_share for stats in alone]

    assert all(0 <= share < 1 for share in shares)
    # Only the last stage reads targets.
    assert [stats.tokens_per_second is None for stats in alone] == [True, False]
    assert [stats.bubble for stats in alone] == [None, None]
    assert [stats.bubble for stats in together] == [pytest.approx(sum(shares) / 2)] * 2
    assert [stats.idle_share for stats in together] == shares
    assert [stats.tokens_per_second for stats in together] == [alone[1].tokens_per_second] * 2
