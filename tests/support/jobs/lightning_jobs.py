"""Trainings of a small model by Lightning: in the test's process, and in those of the pool."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PARTS = 2
SAMPLE = (torch.zeros(2, 4, dtype=torch.float64),)


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))).double()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def loader(samples: int = 12) -> Any:
    x, y = (
        torch.randn(samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (6, 7)
    )
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)


def trainer(folder: Path, epochs: int, *callbacks: Any, **options: Any) -> Any:
    # It takes seconds, and need not be installed.
    return import_module("lightning.pytorch").Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        logger=False,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


def plain_module(optimizer: Callable[[Any], torch.optim.Optimizer]) -> Any:
    """The module for Lightning alone: manual optimization, and gradients of the parts of a batch are added."""

    class Plain(import_module("lightning.pytorch").LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model = make_model()

        def training_step(self, batch: Any, index: int) -> None:
            stepped: Any = self.optimizers()
            stepped.zero_grad()
            losses = [loss_of(self.model(x), y) / PARTS for x, y in zip(*(t.chunk(PARTS) for t in batch), strict=True)]
            for loss in losses:
                self.manual_backward(loss)
            stepped.step()
            self.log("loss", sum(losses).detach())  # type: ignore[union-attr]

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation_loss", loss_of(self.model(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return optimizer(self.model.parameters())

    return Plain()
