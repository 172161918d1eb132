"""A LightningModule that trains through a pipeline: its numbers are those of a plain one, and it saves and resumes."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from support.blocks import WIDTH, Block
from support.processes import Pool

Fit = tuple[dict[str, float], dict[str, Tensor], int]
"""The metrics, the weights and the number of steps."""
PARTS = 2


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 3)).double()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loader() -> Any:
    generator = torch.Generator().manual_seed(6)
    x, y = (torch.randn(16, size, dtype=torch.float64, generator=generator) for size in (WIDTH, 3))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)


def trainer(folder: Path, epochs: int, **options: Any) -> Any:
    # It takes seconds, and need not be installed.
    pl = import_module("lightning.pytorch")
    checkpoint = pl.callbacks.ModelCheckpoint(folder, filename="{step}", monitor="validation_loss", save_top_k=1)
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        callbacks=[checkpoint],
        logger=False,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


def results(run: Any) -> tuple[dict[str, float], int]:
    return {name: float(value) for name, value in run.callback_metrics.items()}, run.global_step


def fit_plainly(folder: Path) -> Fit:
    """By Lightning alone: manual optimization, and gradients of the parts of a batch are added."""
    pl = import_module("lightning.pytorch")

    class Plain(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model = make_model()

        def training_step(self, batch: Any, index: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            losses = [loss_of(self.model(x), y) / PARTS for x, y in zip(*(t.chunk(PARTS) for t in batch), strict=True)]
            for loss in losses:
                self.manual_backward(loss)
            optimizer.step()
            self.log("loss", sum(losses).detach())  # type: ignore[union-attr]

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation_loss", loss_of(self.model(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return momentum(self.model.parameters())

    module, run = Plain(), trainer(folder, 3)
    run.fit(module, loader(), loader())
    metrics, steps = results(run)
    return metrics, dict(module.model.state_dict()), steps


def fit(folder: Path, epochs: int = 3, resumes: str | None = None) -> Fit:
    """Through a pipeline; from the checkpoint `resumes` on, if it is given."""
    from penstock.integrations import PipelineModule, PipelineStrategy

    with penstock.Pipeline(
        make_model(),
        sample=(torch.randn(2, WIDTH).double(),),
        loss_fn=loss_of,
        optimizer=momentum,
        stages=dist.get_world_size() if dist.is_initialized() else 2,
        microbatches=PARTS,
    ) as pipe:
        run = trainer(folder, epochs, strategy=PipelineStrategy())
        run.fit(PipelineModule(pipe), loader(), loader(), ckpt_path=resumes)
        metrics, steps = results(run)
        [tested] = run.test(PipelineModule(pipe), loader(), verbose=False)
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
