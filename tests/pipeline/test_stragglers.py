"""A pipeline finds its slow stage, and a new cut takes layers from it without changing the numbers."""

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from penstock.doctor.stragglers import SlowPart
from penstock.errors import CheckpointError, PenstockError
from penstock.pipeline import Pipeline
from penstock.runtime.assembly.pipeline_options import ModelOptions, PipelineOptions, PlanOptions, RunOptions
from penstock.training.recipes import Recipe
from penstock.values import Plan
from support.jobs.straggler_jobs import LAYERS, STEPS, apply_cut, find_and_recut, train_with_cut
from support.processes import Pool


def test_a_slow_stage_is_found_and_the_new_cut_trains_on_with_the_same_numbers(pool: Pool, tmp_path: Path) -> None:
    answers = pool.run(2, find_and_recut, str(tmp_path / "checkpoint"), False)
    plain = pool.run(2, train_with_cut)

    for (found, plan, losses, _), expected in zip(answers, plain, strict=True):
        assert found.found[0].kind is SlowPart.STAGE
        assert found.found[0].name == "stage 1 on rank 1 (layers [4, 8))"
        assert found.found[0].factor > 2
        assert [rank for rank, *_ in found.work] == [0, 1]
        # The stage takes nearly all of the time, so its layers are shared.
        assert plan.stages[0].stop > LAYERS // 2
        assert plan.predicted is None
        assert losses == expected
    assert answers[0][:2] == answers[1][:2]


def test_in_one_process_stages_are_compared_too(tmp_path: Path) -> None:
    found, plan, losses, measured = find_and_recut(str(tmp_path / "checkpoint"), True)

    assert found.found[0].name == "stage 1 on rank 1 (layers [4, 8))"
    assert plan.stages[0].stop > LAYERS // 2
    assert losses == train_with_cut()
    # A single process has no others to compare its layers with.
    assert [one.kind for one in measured.found] == [SlowPart.STAGE]


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_a_new_cut_is_applied_in_place(pool: Pool, tmp_path: Path, schedule: str) -> None:
    for plan, losses, again, differences in pool.run(2, apply_cut, str(tmp_path), schedule):
        assert plan.planner == "replan"
        assert plan.stages[0].stop > LAYERS // 2
        assert losses[STEPS // 2 :] == again
        assert differences
        assert not any(map(torch.count_nonzero, differences.values()))
        # Under 2bw the cut drains.
        assert schedule == "2bw" or losses == train_with_cut()


def test_a_new_cut_is_applied_where_the_model_has_no_weights(pool: Pool, tmp_path: Path) -> None:
    for plan, losses, again, differences in pool.run(2, apply_cut, str(tmp_path), "gpipe", True):
        assert plan.stages[0].stop > LAYERS // 2
        assert losses[STEPS // 2 :] == again
        assert not any(map(torch.count_nonzero, differences.values()))


def test_a_new_cut_is_applied_in_one_process(tmp_path: Path) -> None:
    plan, losses, again, differences = apply_cut(str(tmp_path), "1f1b-flush", weightless=True, resume=str(tmp_path))

    assert plan.stages[0].stop > LAYERS // 2
    assert losses[STEPS // 2 :] == again
    assert len(differences) == 2 * LAYERS
    assert not any(map(torch.count_nonzero, differences.values()))


def test_a_pipeline_whose_modules_a_hook_has_changed_is_not_cut_anew() -> None:
    trained, recipe = ModelOptions([nn.Linear(4, 4)], (torch.zeros(2, 4),)), Recipe(nn.MSELoss(), torch.optim.SGD)
    options = PipelineOptions(trained, recipe, PlanOptions(), RunOptions(parallelize=lambda stage_module, mesh: None))

    with pytest.raises(PenstockError, match=r"replan\(apply=\): expected a pipeline without parallelize="):
        options.replanned(Plan.uniform(2, 2))


def test_what_is_no_directory_is_refused_before_anything_is_saved() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, wrong = torch.zeros(2, 4), cast("str", 5)
    with Pipeline(model, (x,), nn.functional.mse_loss, torch.optim.SGD, stages=2) as pipe:
        pipe.step(x, x)
        with pytest.raises(CheckpointError, match="directory=5: expected the path of a directory"):
            pipe.replan(apply=wrong)
        pipe.step(x, x)
