"""Trainings of models that use their parameters in other ways than as tensors in attributes of their modules.

Each way has a *twin*: a model with the same mathematics, which does without it.
"""

import copy
import io
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import penstock
from support.blocks import Block, Stack, batches, build, sgd, squares

__all__ = ["ROUNDS", "WAYS", "OwnParameters", "copies", "make", "train", "train_adversaries", "train_these", "use"]

ROUNDS = batches((6, 5, 8, 7))
OwnParameters = tuple[str, str, int, int]
"""The way, the schedule, the number of stages, and that of the replicas of each."""
SCALES: dict[int, float] = {}


class Fixed(Block):
    """Scales its input by a number of its own."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Attribute(Block):
    """The number is an attribute of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * getattr(self.linear.weight, "scale", 1.0))


class Registered(Block):
    """The number is in a table, by the identity of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * SCALES.get(id(self.linear.weight), 1.0))


class Keyed(Block):
    """The number is in a table whose key is the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {self.linear.weight: 0.3}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.table[self.linear.weight])


class ScaledParameter(nn.Parameter):
    """A parameter with a method."""

    def scaled(self, x: Tensor) -> Tensor:
        return x * 0.3


class Subclass(Block):
    """The weight has a method."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight = ScaledParameter(self.linear.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.linear.weight.scaled(x))  # type: ignore[attr-defined]


class Bound(Block):
    """A function holds the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = partial(F.linear, weight=self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (self.compute(x) + self.linear.bias).tanh()


class Enclosed(Block):
    """A closure holds the weight."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.linear.weight
        self.compute = lambda x: F.linear(x, weight)

    def forward(self, x: Tensor) -> Tensor:
        return (self.compute(x) + self.linear.bias).tanh()


class Tabled(Block):
    """A dict and a tuple hold the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.pair = {"weight": self.linear.weight}, (self.linear.weight, self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.table["weight"], self.pair[1]).tanh()


class Weak(Block):
    """A weak reference leads to the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = weakref.ref(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.reference()
        assert weight is not None
        return F.linear(x, weight, self.linear.bias).tanh()


WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "attribute": (Attribute, Fixed),
    "table by identity": (Registered, Fixed),
    "table by weight": (Keyed, Fixed),
    "method": (Subclass, Fixed),
    "bound": (Bound, Block),
    "enclosed": (Enclosed, Block),
    "tabled": (Tabled, Block),
    "weak": (Weak, Block),
    "own backward": (Block, Block),
    "own backward of a part": (Block, Block),
    "kept gradients": (Block, Block),
    "late hook": (Block, Block),
    "late hook after accumulation": (Block, Block),
}


def make(way: str, twin: bool = False) -> Stack:
    model = build(WAYS[way][twin])
    for block in model.blocks:
        if isinstance(block, Attribute):
            block.linear.weight.scale = 0.3  # type: ignore[attr-defined]
        if isinstance(block, Registered):
            SCALES[id(block.linear.weight)] = 0.3
        if isinstance(block, Fixed):
            block.scale = 0.3
    if twin:
        _hook(way, model)
    return model


def use(way: str, model: Stack, step: int) -> None:
    """What the loop does with the model before a step, and the twin does not."""
    if way == "own backward":
        model(ROUNDS[step][0]).sum().backward()
    elif way == "own backward of a part":
        model.blocks[0](ROUNDS[step][0]).sum().backward()
    elif way == "kept gradients":
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 7.0)
    elif step == 0:
        _hook(way, model)


def _hook(way: str, model: Stack) -> None:
    """Registers hooks: those of a twin before the pipeline is built."""
    if way == "late hook":
        model.last.weight.register_hook(lambda gradient: gradient * 0.1)
    elif way == "late hook after accumulation":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_clamp)


def _clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3)


def train(run: OwnParameters, twin: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the weights of the whole model."""
    way, schedule, stages, replicas = run
    model, size = make(way, twin), 6 // stages
    parts = [
        penstock.Stage(s * size, (s + 1) * size, tuple(range(s * replicas, (s + 1) * replicas))) for s in range(stages)
    ]
    plan = penstock.Plan(tuple(parts), schedule, microbatches=4)
    with penstock.Pipeline(model, (ROUNDS[0][0][:1],), squares, sgd, plan=plan) as pipe:
        losses = []
        for step, (x, target) in enumerate(ROUNDS):
            if not twin:
                use(way, model, step)
            losses.append(pipe.step(x, target).loss.item())
        pipe.drain()
        assert all(parameter.grad is None for parameter in pipe.parameters())
        return losses, dict(pipe.full_state_dict(rank=None) or {})


def train_these(runs: Sequence[OwnParameters]) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train(run) for run in runs]


class _Beside(nn.Module):
    """A model beside a frozen copy of another one."""

    def __init__(self, model: nn.Module, frozen: nn.Module) -> None:
        super().__init__()
        self.model, self.frozen = model, frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) - self.frozen(x)


def copies() -> tuple[list[int], bool, list[float], list[float]]:
    """While a pipeline trains a model: how many hooks its copies have, whether a file of it needs Penstock, and the
    losses of a pipeline over a copy and of one over its like that was never trained.
    """
    model, other, file = build(Block), copy.deepcopy(build(Block)), io.BytesIO()
    with penstock.Pipeline(model, (ROUNDS[0][0][:2],), squares, sgd, stages=2, microbatches=2) as pipe:
        twins = [copy.deepcopy(model), copy.deepcopy(other)]
        pipe.step(*ROUNDS[0])
        torch.save(model, file)
        hooks = [_hooks_in(each) for each in (copy.deepcopy(model), AveragedModel(model))]
        losses = []
        for twin in twins:
            torch.manual_seed(7)
            both = _Beside(Stack(Block).double(), twin)
            with penstock.Pipeline(both, (ROUNDS[0][0][:2],), squares, sgd, stages=2, microbatches=2) as second:
                losses.append([second.step(x, target).loss.item() for x, target in ROUNDS])
    return hooks, b"penstock" in file.getvalue(), losses[0], losses[1]


def _hooks_in(model: nn.Module) -> int:
    tables = [table for module in model.modules() for name, table in vars(module).items() if name.endswith("_hooks")]
    return sum(len(table) for table in tables)


def train_adversaries(piped: bool, schedule: str = "1f1b-flush") -> list[float]:
    """The losses of a model, and those of a second one by whose outputs the first one is trained: in two pipelines of
    this process, or in a plain loop.
    """
    maker, judge = build(Block), build(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    judge.last, losses = nn.Linear(6, 6).double(), []
    maker.last = nn.Linear(6, 6).double()
    torch.manual_seed(8)
    for module in (judge.last, maker.last):
        module.reset_parameters()

    def fool(output: Tensor, target: Tensor) -> Tensor:
        return squares(judge(output) - 1.0, target)

    if piped:
        options: dict[str, Any] = {"stages": 2, "microbatches": 2, "schedule": schedule}
        pipes = [
            penstock.Pipeline(m, (ROUNDS[0][0][:2],), f, sgd, **options) for m, f in ((maker, fool), (judge, squares))
        ]
        for x, target in ROUNDS:
            losses += [pipe.step(x, target).loss.item() for pipe in pipes]
        return losses
    optimizers = [sgd(list(model.parameters())) for model in (maker, judge)]
    for x, target in ROUNDS:
        for model, optimizer, loss_fn in ((maker, optimizers[0], fool), (judge, optimizers[1], squares)):
            optimizer.zero_grad()
            parts = [loss_fn(model(part), target) / 2 for part in x.chunk(2)]
            for part in parts:
                part.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(sum(part.item() for part in parts))
    return losses
