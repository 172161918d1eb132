"""Runs with scaled losses: by the tests themselves, and in the processes of the pool."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support.training import Case, Outcome

RISKY = penstock.LossScale(initial=2.0**1023, growth=2.0**5, backoff=2.0**-6, interval=2)
"""So near to what float64 can hold that gradients overflow at first, and again when it grows."""


def loud(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) * 2.0**12


def quiet(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum that takes small steps for them."""
    return torch.optim.SGD(parameters, lr=0.05 / 2.0**12, momentum=0.9)


def scaled_options(case: Case) -> dict[str, Any]:
    return {**case.options, "loss_fn": loud, "optimizer": quiet, "loss_scale": RISKY}


def run_scaled(case: Case, **options: Any) -> tuple[Outcome, list[float | None]]:
    """The run by `Pipeline`, and the scale after each step as this process knows it."""
    pipe = penstock.Pipeline(case.build(), **{**scaled_options(case), "check": "off", **options})
    losses, scales = [], []
    for number, (x, y) in enumerate(case.batches * 2):
        losses.append(pipe.step(x, y).loss)
        scales.append(pipe.loss_scale)
        if number in case.drain_after:
            pipe.drain()
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    pipe.close()
    return Outcome(tuple(map(float, losses)), state), scales
