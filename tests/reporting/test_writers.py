"""What is logged, with a writer of each kind."""

from pathlib import Path

import pytest

import penstock
from support.jobs.metric_jobs import with_accuracy
from support.jobs.stats_jobs import Recorder, log_on_rank_0
from support.processes import Pool
from support.training import Case

CASE = Case("perceptron", "1f1b-flush", 2, 4)
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


def test_another_writer_is_refused() -> None:
    pipe = penstock.Pipeline(CASE.build(), **CASE.options)
    with pytest.raises(penstock.PenstockError, match=r"expected an object with log\(dict, step\) or add_scalar"):
        penstock.log_stats(pipe, print, 1)  # type: ignore[arg-type]
    with pytest.raises(penstock.PenstockError, match=r"every=\): expected a whole number, 1 or more"):
        penstock.log_stats(pipe, None, 1, every=0)
