"""One training as a loop of PyTorch, as a pipeline (here or in several processes) and by the oracle."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler as schedulers

import penstock

__all__ = [
    "CHANGES",
    "OPTIMIZERS",
    "SCHEDULERS",
    "Weights",
    "build",
    "hooked",
    "make_pipeline",
    "rate_of_rank",
    "run_loop",
    "run_oracle",
    "run_pipeline",
    "warnings_of",
    "x",
    "y",
]

STEPS, MICROBATCHES = 6, 4
Weights = dict[str, Tensor]
x, y = (torch.randn(8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in (1, 2))


class _Own(torch.optim.Optimizer):
    """Gradient descent with a rate that `rate` tells."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1) -> None:
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


class GroupCounter(_Own):
    """Corrects its rate by the number of steps, as the fused Adam of apex does."""

    def rate(self, group: dict[str, Any]) -> Any:
        group["step"] = group.get("step", 0) + 1
        return group["lr"] / (1 - 0.9 ** group["step"])


class OwnCounter(_Own):
    """Counts in an attribute, which pickles of Python keep."""

    steps = 0

    def rate(self, group: dict[str, Any]) -> Any:
        self.steps += 1
        return group["lr"] / self.steps


class TensorCounter(_Own):
    """Counts in a tensor of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.steps = torch.zeros(())

    def rate(self, group: dict[str, Any]) -> Any:
        self.steps += 1
        return group["lr"] / self.steps.item()


class StateCounter(_Own):
    """Counts in its state, beside those of parameters."""

    def rate(self, group: dict[str, Any]) -> Any:
        state: Any = self.state
        state["steps"] = state.get("steps", 0) + 1
        return group["lr"] / state["steps"]


class GlobalNorm(_Own):
    """Divides by the norm of all gradients, as LAMB does, and Prodigy and D-Adaptation with other sums."""

    def rate(self, group: dict[str, Any]) -> Any:
        squares = [p.grad.square().sum() for p in group["params"] if p.grad is not None]
        return group["lr"] / torch.stack(squares).sum().sqrt()


def clamping(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Keeps all weights small in a hook after every step."""
    made = torch.optim.SGD(parameters, lr=0.2)

    def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.2, 0.2)

    made.register_step_post_hook(clamp)
    return made


def counting_hooks(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Lowers the rate in a hook before every step."""
    made = torch.optim.SGD(parameters, lr=0.2)

    def lower(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    made.register_step_pre_hook(lower)
    return made


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """With momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "GroupCounter": GroupCounter,
    "OwnCounter": OwnCounter,
    "TensorCounter": TensorCounter,
    "StateCounter": StateCounter,
    "GlobalNorm": GlobalNorm,
    "clamping": clamping,
    "counting_hooks": counting_hooks,
    "sgd": sgd,
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda update: 1 / (update + 1)),
    "LinearLR": lambda o: schedulers.LinearLR(o, total_iters=4),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=40),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.5)], milestones=[3]
    ),
}
CHANGES: dict[str, tuple[str, Any]] = {
    "weight_decay": ("weight_decay", 0.5),
    "lr": ("lr", 0.03),
    "momentum": ("momentum", 0.2),
    "nesterov": ("nesterov", True),
}
"""What the user sets in all groups after the third step."""


def build() -> nn.Sequential:
    """Eight layers."""
    generator = torch.Generator().manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(4, 4, dtype=torch.float64), nn.Tanh())]
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def run_loop(optimizer: str, scheduler: str | None = None, change: str | None = None) -> Weights:
    """The loop of PyTorch."""
    model = build()
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    schedule = SCHEDULERS[scheduler](made) if scheduler else None
    for step in range(STEPS):
        made.zero_grad()
        for inputs, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            (mse_loss(model(inputs), target) / MICROBATCHES).backward()
        made.step()
        if schedule is not None:
            schedule.step()
        _change(made, change, step)
    return model.state_dict()


def make_pipeline(schedule: str, optimizer: Any, **options: Any) -> penstock.Pipeline:
    """With four stages where a rank holds two, else with two."""
    stages = 4 if schedule in ("interleaved", "zb-v") else 2
    made = OPTIMIZERS.get(optimizer, optimizer) if isinstance(optimizer, str) else optimizer
    given = {"sample": (x[:2],), "loss_fn": mse_loss, "optimizer": made, "schedule": schedule, "stages": stages}
    return penstock.Pipeline(build(), **{**given, "microbatches": MICROBATCHES, **options})


def run_pipeline(
    schedule: str, optimizer: str, scheduler: str | None = None, change: str | None = None, drains: bool = False
) -> Weights:
    """The pipeline; `drains` before the change of options."""
    pipe = make_pipeline(schedule, optimizer, lr_scheduler=SCHEDULERS[scheduler] if scheduler else None)
    for step in range(STEPS):
        pipe.step(x, y)
        if drains and step == 2:
            pipe.drain()
        _change(pipe.optimizer, change, step)
    state = pipe.state_dict()["model"]
    weights: Weights = {name: tensor.clone() for name, tensor in state.items()}
    pipe.close()
    return weights


def run_oracle(schedule: str, optimizer: str, scheduler: str | None = None) -> Weights:
    """`penstock.reference_train`."""
    return penstock.reference_train(
        build(),
        [(x, y)] * STEPS,
        sample=(x[:2],),
        loss_fn=mse_loss,
        optimizer=OPTIMIZERS[optimizer],
        schedule=schedule,
        stages=4 if schedule in ("interleaved", "zb-v") else 2,
        microbatches=MICROBATCHES,
        lr_scheduler=SCHEDULERS[scheduler] if scheduler else None,
    ).state


def warnings_of(optimizer: Callable[[Any], torch.optim.Optimizer]) -> list[str]:
    """The warnings at a pipeline with `optimizer`."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    make_pipeline("1f1b-flush", optimizer).close()
    logging.getLogger("penstock").removeHandler(handler)
    return said


def rate_of_rank(parameters: Any) -> torch.optim.Optimizer:
    """Has another rate on every rank."""
    return torch.optim.SGD(parameters, lr=0.1 * (torch.distributed.get_rank() + 1))


def hooked(parameters: Any) -> torch.optim.Optimizer:
    """Has a hook on its steps."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    return optimizer


def _change(optimizer: torch.optim.Optimizer | None, change: str | None, step: int) -> None:
    if change is not None and step == 2 and optimizer is not None:
        key, value = CHANGES[change]
        for group in optimizer.param_groups:
            group[key] = value
