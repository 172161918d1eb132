"""Loss scaling: updates with gradients that overflow are skipped on every stage, and the scale follows its rule."""

from dataclasses import replace

import pytest
import torch

import penstock
from penstock.training.scaling import LossScale, LossScaler
from support import models
from support.jobs.precision_jobs import CAST, cast_options
from support.training import Case, assert_equal, run_pipeline, run_reference


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-flush"])
def test_a_power_of_two_that_does_not_overflow_changes_no_bit(schedule: str) -> None:
    case = Case("layered", schedule, 3, 4)

    assert_equal(run_reference(case), run_pipeline(case, loss_scale=2.0**10))


def test_float16_equals_a_plain_loop_with_the_scaler_of_pytorch() -> None:
    rule = {"init_scale": 2.0**30, "growth_interval": 2}
    options = cast_options("gpipe", 3, 1, torch.float16)
    pipe = penstock.Pipeline(CAST["linear"](), **options, loss_scale=LossScale(2.0**30, interval=2))
    model = CAST["linear"]()
    optimizer, scaler = models.momentum(list(model.parameters())), torch.amp.GradScaler("cpu", **rule)
    for x, y in models.LAYERED.batches * 8:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(x.float()), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

        assert float(pipe.step(x.float(), y).loss) == loss.item()
        assert pipe.loss_scale == scaler.get_scale()
    # It fell until nothing overflowed.
    assert scaler.get_scale() < 2.0**25


def test_an_overflow_lowers_only_the_scale_that_it_was_made_with() -> None:
    course = LossScaler(LossScale(16.0, interval=2))
    assert [course.scale_of(update) for update in (1, 2)] == [16.0, 16.0]
    course.update(1, overflow=True)
    assert course.scale == 8.0
    course.update(2, overflow=True)  # made with 16 too
    assert (course.scale, course.scale_of(3)) == (8.0, 8.0)
    course.update(3, overflow=False)
    course.update(4, overflow=False)
    assert course.scale == 16.0


def test_what_a_loss_scale_may_be() -> None:
    case = Case("perceptron", "gpipe", 2, 1)
    for wish, scale in (("dynamic", 65536.0), (8, 8.0)):
        assert penstock.Pipeline(case.build(), **case.options, loss_scale=wish).loss_scale == scale
    assert penstock.Pipeline(case.build(), **case.options).loss_scale is None
    for wrong in ({"initial": 0.0}, {"growth": 0.5}, {"backoff": 2.0}, {"interval": -1}):  # type: ignore[assignment]
        with pytest.raises(penstock.PenstockError, match=f"{next(iter(wrong))}: expected"):
            replace(LossScale(), **wrong)
