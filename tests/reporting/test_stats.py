"""What a pipeline says of its speed: its numbers agree with each other, steps stay as they are, and writers of each
kind log them.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from penstock.values.plans import Prediction
from support.processes import Pool
from support.training import Case, run_pipeline, with_accuracy

CASE = Case("perceptron", "1f1b-flush", 2, 4)


class Recorder:
    """Remembers what is logged, with the method of a run of Weights & Biases."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, data: dict[str, float], step: int) -> None:
        self.logged.append((step, data))


def count(target: Tensor) -> float:
    """Three items for a sample."""
    return 3.0 * len(target)


def stats_of_all_ranks(case: Case) -> tuple[penstock.Stats, penstock.Stats]:
    """The statistics of this rank alone, and of all."""
    with penstock.Pipeline(case.build(), **case.options, loss_weight=count) as pipe:
        for x, y in case.batches[:3]:
            pipe.step(x, y)
        torch.distributed.barrier()
        return pipe.stats(), pipe.stats(all_ranks=True)


def log_on_rank_0(case: Case, all_ranks: bool) -> list[tuple[int, dict[str, float]]]:
    """What rank 0 logs of every second step; the other ranks have no writer."""
    recorder = Recorder()
    with penstock.Pipeline(case.build(), **case.options) as pipe:
        for step, (x, y) in enumerate(case.batches[:4], 1):
            result = pipe.step(x, y)
            penstock.log_stats(pipe, recorder if pipe.rank == 0 else None, step, result, every=2, all_ranks=all_ranks)
    return recorder.logged


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


KNOWN = {"steps", "step_seconds", "samples_per_second", "flops_per_second", "predicted_bubble"}


def test_every_second_step_is_logged() -> None:
    recorder = Recorder()
    losses = {}
    pipe = penstock.Pipeline(CASE.build(), **{**CASE.options, "loss_fn": with_accuracy})
    for step, (x, y) in enumerate(CASE.batches[:4]):
        result = pipe.step(x, y)
        losses[step] = {"loss": float(result.loss), **result.metrics}
        penstock.log_stats(pipe, recorder, step, result, every=2, tokens_per_sample=5)

    assert [step for step, _ in recorder.logged] == [0, 2]
    for step, numbers in recorder.logged:
        assert {name: number for name, number in numbers.items() if not name.startswith("penstock/")} == losses[step]
        assert {f"penstock/{name}" for name in KNOWN | {"tokens_per_second"}} <= numbers.keys()


@pytest.mark.processes
@pytest.mark.parametrize("all_ranks", [False, True])
def test_ranks_without_a_writer_log_nothing(pool: Pool, all_ranks: bool) -> None:
    first, other = pool.run(2, log_on_rank_0, CASE, all_ranks)

    assert [step for step, _ in first] == [2, 4]
    assert [("penstock/bubble" in numbers) for _, numbers in first] == [all_ranks] * 2
    assert other == []


def test_without_a_result_nothing_waits_for_the_loss() -> None:
    recorder = Recorder()
    pipe = penstock.Pipeline(CASE.build(), **CASE.options)
    pipe.step(*CASE.batches[0])
    penstock.log_stats(pipe, recorder, 10)

    ((step, numbers),) = recorder.logged
    assert step == 10
    assert all(name.startswith("penstock/") for name in numbers)


def test_tensorboard(tmp_path: Path) -> None:
    files = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="SummaryWriter needs TensorBoard"
    )
    from torch.utils.tensorboard import SummaryWriter

    pipe = penstock.Pipeline(CASE.build(), **CASE.options)
    with SummaryWriter(tmp_path) as writer:
        for step, (x, y) in enumerate(CASE.batches[:2]):
            result = pipe.step(x, y)
            penstock.log_stats(pipe, writer, step, result, every=1)
    events = files.EventAccumulator(str(tmp_path))
    events.Reload()

    assert {f"penstock/{name}" for name in KNOWN} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("loss")] == [0, 1]
    assert events.Scalars("loss")[1].value == pytest.approx(float(result.loss))
