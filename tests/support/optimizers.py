"""Optimizers whose steps are more than an update of every parameter by itself."""

from typing import Any

import torch


class Own(torch.optim.Optimizer):
    """Gradient descent with a rate that `rate` tells."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def rate(self, group: dict[str, Any]) -> Any:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        rates = [self.rate(group) for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad


class GroupCounter(Own):
    """Corrects its rate by the number of steps, as the fused Adam of apex does."""

    def rate(self, group: dict[str, Any]) -> Any:
        group["step"] = group.get("step", 0) + 1
        return group["lr"] / (1 - 0.9 ** group["step"])


class OwnCounter(Own):
    """Counts in an attribute, which pickles of Python keep."""

    steps = 0

    def rate(self, group: dict[str, Any]) -> Any:
        self.steps += 1
        return group["lr"] / self.steps


class GlobalNorm(Own):
    """Divides by the norm of all gradients, as LAMB does, and Prodigy and D-Adaptation with other sums."""

    def rate(self, group: dict[str, Any]) -> Any:
        squares = [p.grad.square().sum() for each in self.param_groups for p in each["params"] if p.grad is not None]
        return group["lr"] / torch.stack(squares).sum().sqrt()


def clamping(parameters: Any) -> torch.optim.Optimizer:
    """Keeps all weights small in a hook after every step."""
    made = torch.optim.SGD(parameters, lr=0.2)

    def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.2, 0.2)

    made.register_step_post_hook(clamp)
    return made
