"""Saves without a stop: neither the run that is saved nor the one that resumes differs by a bit from one without."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

import penstock
from penstock.scheduling import ScheduleDefinition
from support import models
from support.own_schedules import LATE, ROLLING
from support.training import Case, Outcome, train_by_oracle

BATCHES = models.LAYERED.batches * 2
"""Enough for a pipe of four stages to be full at the cut, and to be filled again after it."""


@cache
def reference(case: Case) -> Outcome:
    return train_by_oracle(case.build(), BATCHES, **case.options)


def build(case: Case, **options: Any) -> penstock.Pipeline:
    return penstock.Pipeline(case.build(), **{**case.options, **options})


class Noting(penstock.UpdateHook):
    """Sets an event when the last layer is updated, whose stage is the first that is saved."""

    def __init__(self) -> None:
        self.updated = Event()

    def after_step(self, update: penstock.WeightUpdate) -> None:
        if update.name.startswith("7."):
            self.updated.set()


@pytest.mark.parametrize("schedule", ["1f1b-flush", "pipedream"])
def test_steps_compute_while_the_state_is_copied_and_updates_wait(schedule: str, tmp_path: Path) -> None:
    """The thread begins to copy when the next step computes, or later: if it can, after the first update."""
    case, computing, hook = Case("layered", schedule, 2, 4), Event(), Noting()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        computing.set()
        return F.cross_entropy(output, target)

    def dawdle() -> tuple[bool, bool]:
        return computing.wait(60), hook.updated.wait(1)

    pipe = build(case, loss_fn=loss_fn, update_hooks=[hook])
    for batch in BATCHES[:2]:
        pipe.step(*batch)
    computing.clear()
    hook.updated.clear()
    seen = pipe._engine.snapshots.copier.submit(dawdle)
    save = pipe.save(tmp_path / "run", wait=False)
    losses = [float(pipe.step(*batch).loss) for batch in BATCHES[2:]]
    path = save.wait()
    resumed = build(case, update_hooks=[Noting()])
    resumed.load(path)

    assert seen.result() == (True, False), "whether the step computed, and whether an update did not wait"
    assert save.stalled_seconds > 0
    assert (path.name, resumed.steps) == ("step-000002", 2)
    assert [float(resumed.step(*batch).loss) for batch in BATCHES[2:]] == losses
    assert losses == list(reference(case).losses[2:])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "apart"),
    [("2bw", 4, 4, 1), ("pipedream", 4, 3, 1), ("pipedream", 4, 2, 2), ("pipedream", 4, 1, 3)],
)
def test_saves_that_follow_each_other_drain_only_where_a_stage_is_behind(
    schedule: str, ranks: int, microbatches: int, apart: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stage at the front makes its last update of a minibatch (p-1)/m steps later, rounded up."""
    case = Case("layered", schedule, ranks, microbatches)

    def train(name: str, every: int) -> list[float]:
        pipe, losses = build(case), []
        for number, batch in enumerate(BATCHES):
            losses.append(float(pipe.step(*batch).loss))
            if number % every == 0:
                pipe.save(tmp_path / name, wait=False)
        pipe.drain()
        pipe.close()
        return losses

    assert train("apart", apart) == list(reference(case).losses)
    assert "drains the pipeline" not in caplog.text
    if apart > 1:
        train("close", apart - 1)
        assert "drains the pipeline" in caplog.text


@pytest.mark.parametrize("definition", [LATE, ROLLING], ids=str)
def test_a_schedule_of_ones_own_is_saved_without_a_stop(definition: ScheduleDefinition, tmp_path: Path) -> None:
    case = Case("layered", "2bw", 3, 4)
    plan = replace(case.options["plan"], schedule=definition)
    expected = penstock.reference_train(case.build(), BATCHES, **{**case.options, "plan": plan})
    pipe, resumed = build(case, plan=plan), build(case, plan=plan)
    for batch in BATCHES[:3]:
        pipe.step(*batch)
    save = pipe.save(tmp_path / "run", wait=False)
    for batch in BATCHES[3:]:
        pipe.step(*batch)
    resumed.load(save.wait())

    assert [float(resumed.step(*batch).loss) for batch in BATCHES[3:]] == list(expected.losses[3:])


def test_what_cannot_be_cut_is_drained(tmp_path: Path) -> None:
    """Three microbatches are no whole number of rounds of two replicas."""
    case = Case("layered", "pipedream", 2, 3, replicas=(2, 1))
    expected = penstock.reference_train(case.build(), BATCHES, **case.options, drain_after=[2])
    pipe, resumed = build(case), build(case)
    for batch in BATCHES[:3]:
        pipe.step(*batch)
    save = pipe.save(tmp_path / "run", wait=False)
    losses = [float(pipe.step(*batch).loss) for batch in BATCHES[3:]]
    resumed.load(save.wait())

    assert losses == list(expected.losses[3:])
    assert [float(resumed.step(*batch).loss) for batch in BATCHES[3:]] == losses


def test_another_plan_goes_on_from_the_newest_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after a drain: 2bw computes the same on any number of stages."""
    case = Case("layered", "2bw", 3, 4, "adamw")
    expected = penstock.reference_train(case.build(), BATCHES, **case.options, drain_after=[2])
    pipe, resumed = build(case), build(Case("layered", "2bw", 2, 4, "adamw"))
    for batch in BATCHES[:3]:
        pipe.step(*batch)
    save = pipe.save(tmp_path / "run", wait=False)
    for batch in BATCHES[3:]:
        pipe.step(*batch)
    with caplog.at_level("INFO", "penstock"):
        resumed.load(save.wait())

    assert [float(resumed.step(*batch).loss) for batch in BATCHES[3:]] == list(expected.losses[3:])
    assert "goes on from the newest weights, as after a drain" in caplog.text


def test_wait_drains_where_stages_are_behind(tmp_path: Path) -> None:
    case = Case("layered", "pipedream", 3, 1)
    pipe, resumed = build(case), build(case)
    for batch in BATCHES[:4]:
        pipe.step(*batch)
    save = pipe.save(tmp_path / "run", wait=False)
    assert not save.done
    resumed.load(save.wait())

    assert [float(resumed.step(*batch).loss) for batch in BATCHES[4:]] == list(reference(case).losses[4:])


def test_a_save_that_fails_is_reported_and_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case("layered", "1f1b-flush", 2, 4)
    pipe = build(case)
    losses = [float(pipe.step(*BATCHES[0]).loss)]
    (tmp_path / "run").write_text("a file")
    with pytest.raises(penstock.CheckpointError, match="expected a directory or nothing, found a file"):
        pipe.save(tmp_path / "run", wait=False)
    pipe.save(tmp_path / "first", 7)
    (tmp_path / "first" / "step-000001").mkdir()
    (tmp_path / "first" / "step-000001" / "notes.txt").write_text("mine")
    save = pipe.save(tmp_path / "first", wait=False)
    with pytest.raises(penstock.CheckpointError, match="found files that Penstock has not written"):
        save.wait()
    losses.append(float(pipe.step(*BATCHES[1]).loss))
    second = pipe.save(tmp_path / "other", wait=False)
    third = pipe.save(tmp_path / "third", wait=False)
    pipe.close()

    assert "a save beside the training failed, and the training goes on" in caplog.text
    assert losses == list(reference(case).losses[:2])
    # The second was waited for by the third, and the third by close().
    assert second.done and third.done
    assert (second.wait().parent.name, third.wait().parent.name) == ("other", "third")


def test_close_drains_and_finishes_a_save_whose_stages_are_behind(tmp_path: Path) -> None:
    case = Case("layered", "pipedream", 3, 1)
    pipe = build(case)
    pipe.step(*BATCHES[0])
    save = pipe.save(tmp_path / "run", wait=False)
    pipe.close()

    assert save.wait() == tmp_path / "run" / "step-000001"


def test_a_save_whose_stages_are_behind_is_given_up_after_an_error(tmp_path: Path) -> None:
    case = Case("layered", "pipedream", 3, 1)
    pipe = build(case)
    pipe.step(*BATCHES[0])
    save = pipe.save(tmp_path / "run", wait=False)
    with pytest.raises(KeyError), pipe:
        raise KeyError("an error of the script")

    with pytest.raises(penstock.CheckpointError, match=r"Call drain\(\) or the save's wait\(\) before close\(\)"):
        save.wait()
    assert penstock.latest_checkpoint(tmp_path / "run") is None
