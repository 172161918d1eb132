"""Recipes for updates, and runs with them: by the tests themselves, and in the processes of the pool."""

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import penstock
from support import models
from support.training import Case, Outcome, run_pipeline

__all__ = ["RECIPES", "reload", "run_recipe", "warm"]


def warm(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Another rate for every update."""
    return LambdaLR(optimizer, lambda update: (1 + update) / 7)


def cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Changes the momentum too."""
    return OneCycleLR(optimizer, max_lr=[0.1] * len(optimizer.param_groups), total_steps=60)


def group(params: penstock.NamedParameters) -> torch.optim.Optimizer:
    """No decay for vectors, and another rate for the first layers; a process may have nothing for one group."""
    early = params.where(lambda name, p: p.ndim > 1 and name.split(".")[0] in ("0", "1"))
    late = params.where(lambda name, p: p.ndim > 1 and name.split(".")[0] not in ("0", "1"))
    groups = [
        {"params": early, "weight_decay": 0.1, "lr": 0.2},
        {"params": late, "weight_decay": 0.1},
        {"params": params.where(lambda name, p: p.ndim <= 1), "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def several(params: penstock.NamedParameters) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest."""
    matrices, others = params.where(lambda name, p: p.ndim == 2), params.where(lambda name, p: p.ndim != 2)
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=0.02))
    if others:
        made.append(torch.optim.AdamW(others, lr=0.01))
    return made


RECIPES: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": models.momentum},
    "groups": {"optimizer": group},
    "several": {"optimizer": several, "lr_scheduler": warm},
    "warming": {"optimizer": models.momentum, "lr_scheduler": warm},
    "cycling": {"optimizer": models.momentum, "lr_scheduler": cycle},
}
"""Arguments for the pipeline and for the oracle."""


def run_recipe(case: Case, recipe: str) -> Outcome:
    """The run by `Pipeline`."""
    return run_pipeline(case, **RECIPES[recipe])


def reload(case: Case, recipe: str) -> tuple[Outcome, Outcome]:
    """The last batches of a run that was drained after two batches, and the same of one that began from its state."""
    options = {**case.options, **RECIPES[recipe]}
    pipe = penstock.Pipeline(case.build(), **options)
    for x, y in case.batches[:2]:
        pipe.step(x, y)
    state = {
        part: {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in entries.items()}
        if part == "model"
        else entries
        for part, entries in pipe.state_dict().items()
    }
    resumed = penstock.Pipeline(case.build(), **options)
    resumed.load_state_dict(state)
    return _finish(pipe, case), _finish(resumed, case)


def _finish(pipe: penstock.Pipeline, case: Case) -> Outcome:
    losses = [float(pipe.step(x, y).loss) for x, y in case.batches[2:]]
    return Outcome(tuple(losses), pipe.state_dict()["model"])
