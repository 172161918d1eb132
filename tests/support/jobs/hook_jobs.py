"""Hooks that see updates, and runs with them: by the tests themselves, and in the processes of the pool."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import penstock
from support import models
from support.training import Case, Outcome, run_pipeline


class Dragging(penstock.UpdateHook):
    """A user's own: moves weights towards what they were two updates ago."""

    def after_step(self, update: penstock.WeightUpdate) -> None:
        update.after.lerp_(update.state.get("older", update.before), 0.1)
        update.state["older"] = update.before.clone()


class Shrinking(Dragging):
    """Lets forwards read something else, too."""

    def predicts(self, delay: int) -> bool:
        return True

    def predict(self, update: penstock.WeightUpdate) -> Tensor:
        return update.after * (1 + 0.01 * update.delay) + 1e-3


HOOKED: dict[str, dict[str, Any]] = {
    "prediction": {"update_hooks": [penstock.WeightPrediction()]},
    "dragging": {"update_hooks": [Dragging()], "optimizer": models.adamw},
    "several": {"update_hooks": [Dragging(), penstock.WeightPrediction(0.3), penstock.WeightAverage(0.5)]},
    "own": {"update_hooks": [Shrinking()]},
    "clipped": {"update_hooks": [penstock.WeightPrediction()], "clip_grad_norm": 0.5},
    "scaled": {
        "update_hooks": [Dragging(), penstock.WeightPrediction()],
        "loss_scale": penstock.LossScale(initial=2.0**1023, interval=3),
    },
    "nadam": {"optimizer": partial(torch.optim.NAdam, lr=0.01, betas=(0.99, 0.999))},
}
"""Arguments for the pipeline and for the oracle."""
NORMED = ("clipped", "scaled")
"""Those of them that need the norms of all stages, which `pipedream` has not."""


def run_hooked(case: Case, recipe: str) -> Outcome:
    return run_pipeline(case, **HOOKED[recipe])
