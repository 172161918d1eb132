"""A pipeline finds its slow stage, and a new cut takes layers from it without changing the numbers."""

import os
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import penstock
from penstock.doctor.stragglers import SlowPart, Stragglers
from penstock.errors import CheckpointError, PenstockError
from penstock.pipeline import Pipeline
from penstock.runtime.assembly.pipeline_options import ModelOptions, PipelineOptions, PlanOptions, RunOptions
from penstock.training.recipes import Recipe
from penstock.values import Plan
from support.counters import Counter
from support.processes import Pool

LAYERS, STEPS = 8, 6


class _Layer(nn.Module):
    """A linear layer; in a slow one every forward takes 30 ms more: longer than a busy machine holds up another."""

    def __init__(self, slow: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.slow = slow

    def forward(self, x: Tensor) -> Tensor:
        if self.slow:
            time.sleep(0.03)
        return torch.tanh(self.linear(x))


def _pipeline(plan: Plan, slow: bool, weightless: bool = False, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    with torch.device("meta" if weightless else "cpu"):
        model = nn.Sequential(*(_Layer(slow and layer >= LAYERS // 2) for layer in range(LAYERS)))
    if weightless:
        options["init_fn"] = penstock.reset_parameters(model)
    return penstock.Pipeline(
        model,
        sample=(torch.randn(2, 4, dtype=torch.float64),),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        plan=plan,
        **options,
    )


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, dtype=torch.float64, generator=generator) for _ in range(STEPS)]


def _train(pipe: penstock.Pipeline, batches: list[Tensor]) -> list[float]:
    return [float(pipe.step(batch, batch).loss) for batch in batches]


def train_with_cut() -> list[float]:
    with _pipeline(Plan.uniform(LAYERS, 2, "1f1b-flush", 4), slow=False) as pipe:
        return _train(pipe, _batches())


def find_and_recut(directory: str, layers: bool) -> tuple[Stragglers, Plan, list[float], Any]:
    """The stragglers of the first steps, the new plan, and the losses of all steps, of which it ran the second half.
    With `layers`, the stragglers among the layers.
    """
    batches = _batches()
    with _pipeline(Plan.uniform(LAYERS, 2, "1f1b-flush", 4), slow=True) as pipe:
        losses = _train(pipe, batches[: STEPS // 2])
        found, plan = pipe.stragglers(), pipe.replan()
        measured = pipe.stragglers(layers=True) if layers else None
        pipe.save(directory)
    with _pipeline(plan, slow=True) as pipe:
        pipe.load(directory)
        return found, plan, losses + _train(pipe, batches[STEPS // 2 :]), measured


def apply_cut(
    directory: str, schedule: str, weightless: bool = False, **options: Any
) -> tuple[Plan, list[float], list[float], dict[str, Tensor]]:
    """The plan after it was applied in place; the losses of all steps; those after the cut of a pipeline that was built
    with the plan and has loaded the checkpoint; and by name the differences between the weights of both at the end.
    """
    batches = penstock.loader(TensorDataset(*2 * [torch.stack(_batches())]), 1)
    losses, rest = [], []
    with _pipeline(Plan.uniform(LAYERS, 2, schedule, 4), slow=True, weightless=weightless, **options) as pipe:
        tracked = Counter()
        pipe.track(tracked=tracked, batches=batches)
        for number, ((x,), (y,)) in enumerate(batches, 1):
            losses.append(float(pipe.step(x, y).loss))
            tracked.steps += 1
            if number == STEPS // 2:
                pipe.replan(apply=directory)
            elif number > STEPS // 2:
                rest.append((x, y))
        assert tracked.steps == STEPS == pipe.steps
        pipe.drain()
        found = {name: tensor.detach().clone() for name, tensor in pipe.named_parameters()}
        plan = pipe.plan
    with _pipeline(plan, slow=True, weightless=weightless, **options) as pipe:
        pipe.load(f"{directory}/step-{STEPS // 2:06d}")
        again = [float(pipe.step(x, y).loss) for x, y in rest]
        pipe.drain()
        differences = {name: tensor.detach() - found[name] for name, tensor in pipe.named_parameters()}
        return plan, losses, again, differences


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


class _Slowed(_Layer):
    """Gets slow when the environment says so: a machine that another job has come to. Before, all take about as long,
    on a busy machine, too.
    """

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05 if self.slow and "SLOWED" in os.environ else 0.003)
        return torch.tanh(self.linear(x))


def test_a_new_cut_keeps_what_was_measured_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(_Slowed(layer >= LAYERS // 2) for layer in range(LAYERS))), _batches()[0]
    options: dict[str, Any] = {"stages": 2, "microbatches": 4, "plan": "auto", "on_nonfinite": "rollback"}
    loss, run = nn.functional.mse_loss, str(tmp_path)
    with Pipeline(model, (x[:2],), loss, lambda p: torch.optim.SGD(p, lr=1e-2), resume=run, **options) as pipe:
        pipe.save(run)
        pipe.step(x * torch.nan, x)
        known, before = pipe.auto_plan, pipe.plan
        monkeypatch.setenv("SLOWED", "1")
        for _ in range(4):
            pipe.step(x, x)
        pipe.replan(apply=run)

        assert pipe.plan.stages != before.stages
        assert pipe.auto_plan is known is not None
        assert pipe.rollbacks == 1
        pipe.step(x, x)


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
