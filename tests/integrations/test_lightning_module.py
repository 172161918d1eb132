"""A LightningModule that trains through a pipeline: its numbers are those of a plain one, and it saves and resumes."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import penstock
from support.jobs.lightning_jobs import PARTS, SAMPLE, loader, loss_of, make_model, plain_module, trainer
from support.processes import Pool

Fit = tuple[dict[str, float], dict[str, Tensor], int]
"""The metrics, the weights and the number of steps."""


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def keeping(folder: Path, epochs: int, **options: Any) -> Any:
    checkpoint = import_module("lightning.pytorch").callbacks.ModelCheckpoint(
        folder, filename="{step}", monitor="validation_loss", save_top_k=1
    )
    return trainer(folder, epochs, checkpoint, **options)


def results(run: Any) -> tuple[dict[str, float], int]:
    return {name: float(value) for name, value in run.callback_metrics.items()}, run.global_step


def fit_plainly(folder: Path) -> Fit:
    module, run = plain_module(momentum), keeping(folder, 3)
    run.fit(module, loader(16), loader(16))
    metrics, steps = results(run)
    return metrics, dict(module.model.state_dict()), steps


def fit(folder: Path, epochs: int = 3, resumes: str | None = None) -> Fit:
    """Through a pipeline; from the checkpoint `resumes` on, if it is given."""
    from penstock.integrations import PipelineModule, PipelineStrategy

    with penstock.Pipeline(
        make_model(),
        sample=SAMPLE,
        loss_fn=loss_of,
        optimizer=momentum,
        stages=dist.get_world_size() if dist.is_initialized() else 2,
        microbatches=PARTS,
    ) as pipe:
        run = keeping(folder, epochs, strategy=PipelineStrategy())
        run.fit(PipelineModule(pipe), loader(16), loader(16), ckpt_path=resumes)
        metrics, steps = results(run)
        [tested] = run.test(PipelineModule(pipe), loader(16), verbose=False)
        return {**metrics, **tested}, dict(pipe.full_state_dict(rank=None) or {}), steps


def fit_and_resume(folder: Path) -> tuple[Fit, Fit, list[str]]:
    """A training, one that ends and goes on from its checkpoint, and the files that the first one leaves."""
    whole = fit(folder / "whole")
    files = sorted(path.name for path in (folder / "whole").iterdir())
    fit(folder / "parts", epochs=2)
    resumed: Callable[..., Fit] = fit
    return whole, resumed(folder / "parts", resumes=str(folder / "parts" / "step=8.ckpt")), files


pytest.importorskip("lightning")
# Lightning advises about loggers and workers, and uses names of old of PyTorch.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_numbers_of_plain_lightning(processes: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    metrics, weights, steps = fit_plainly(tmp_path / "plain")
    if processes == 1:
        found = [fit_and_resume(tmp_path / "run")]
    else:
        pool: Pool = request.getfixturevalue("pool")
        found = pool.run(processes, fit_and_resume, tmp_path / "run")

    for whole, resumed, files in found:
        assert files == ["step=12.ckpt", "step=12.ckpt.pipeline"]
        for own, trained, count in (whole, resumed):
            assert count == steps == 12
            # Lightning logs in float32.
            assert own["loss"] == pytest.approx(metrics["loss"], rel=1e-6)
            assert own["validation_loss"] == pytest.approx(metrics["validation_loss"], rel=1e-6)
            assert own["test_loss"] == own["validation_loss"]
            assert trained.keys() == weights.keys()
            assert all(torch.equal(trained[name], tensor) for name, tensor in weights.items())

    saved = torch.load(tmp_path / "run" / "whole" / "step=12.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())
