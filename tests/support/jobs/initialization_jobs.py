"""Models without weights, and jobs that train them in the processes of the pool."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import penstock
from support import models
from support.training import Case

BUILDS: dict[str, Callable[[], nn.Module]] = {"layered": models.layered, "normalized": models.Normalized}


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` makes, in float64, without memory."""
    with torch.device("meta"):
        return build().double()


def draw(name: str, tensor: Tensor) -> None:
    """An init_fn: normal numbers, and what a constructor would compute."""
    if name == "table":
        tensor.copy_(torch.arange(float(tensor.numel())).sin())
    elif tensor.is_floating_point():
        tensor.normal_(std=0.3)
    else:
        tensor.zero_()


def train_from_nothing(case: Case) -> tuple[tuple[float, ...], dict[str, Tensor], list[str]]:
    """Losses and weights of this process's part of a training, and the parameters that take memory in it."""
    model = on_meta(BUILDS[case.subject])
    pipe = penstock.Pipeline(model, init_fn=draw, **case.options)
    losses = [pipe.step(x, y).loss for x, y in case.batches]
    pipe.drain()
    evaluated = pipe.evaluate(*case.batches[0])
    state = pipe.state_dict()["model"]
    held = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    found = (*(float(loss) for loss in losses), float(evaluated.loss))
    pipe.close()
    return found, {name: tensor.clone() for name, tensor in state.items()}, held
