"""Losses that read parameters, run where a stage is in another process."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock


def tall() -> nn.Sequential:
    """Five layers, of which two stages hold some each."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def penalized(model: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    """A loss with a penalty on the weights of `model`."""
    return functional.mse_loss(output, target) + 0.1 * sum(p.abs().sum() for p in model.parameters())


def scaled(model: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    """A loss times a number that depends on the weights of `model`, without gradients."""
    with torch.no_grad():
        norms = torch.stack([p.norm() for p in model.parameters()])
    return functional.mse_loss(output, target) * norms.sum()


def refusal_of(part: str, schedule: str, loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = penalized) -> str:
    """The error of a step with a `loss` that reads all layers, or the last one; empty if there is none."""
    model = tall()
    read = model if part == "all" else model[-1]
    pipe = penstock.Pipeline(
        model,
        (torch.zeros(2, 4).double(),),
        lambda output, target: loss(read, output, target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        stages=2,
        microbatches=4,
        schedule=schedule,
    )
    torch.manual_seed(1)
    try:
        pipe.step(torch.randn(8, 4).double(), torch.randn(8, 4).double())
    except penstock.PenstockError as error:
        return str(error)
    return ""
