"""Trainings that look usual, and that a pipeline may train with other numbers than the user's own loop.

Each was such an input once. `FOUND` has them as functions which return the arguments of `penstock.rehearse`, the model
and the batches among them; the model is made anew at every call, and so is all that belongs to it.
"""

import copy
import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.models import Blocks, sgd
from support.optimizers import GlobalNorm, GroupCounter, OwnCounter

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    name: str
    make: Callable[[], Arguments]
    """The arguments by name; `accumulation` may be among them."""


def training(model: Any, inputs: Any, target: Any, loss_fn: Any = F.mse_loss, **options: Any) -> Arguments:
    """Three steps on one batch; the sample is its first two rows."""
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    arguments = {"sample": tuple(x[:2] for x in tensors), "optimizer": sgd, "stages": 2, "microbatches": 4}
    return {"model": model, "batches": [(inputs, target)] * 3, "loss_fn": loss_fn, **arguments, **options}


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(width, width, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Chain(Blocks):
    """Four blocks in a row."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__(block)


def chained(model: nn.Module, **options: Any) -> Arguments:
    return training(model, rows(8, 8), rows(8, 8), **options)


# What loss_fn reads: parameters.


def network(width: int = 4) -> nn.Sequential:
    layers = [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)]
    return nn.Sequential(*layers).double()


def penalty(power: int, schedule: str) -> Arguments:
    model = network()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + 0.1 * sum(p.abs().pow(power).sum() for p in model.parameters())

    return training(model, rows(8, 4), rows(8, 4), loss, schedule=schedule)


class PenaltyWithin(nn.Module):
    """A loss that has the model as an attribute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = [model]

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + 0.1 * sum(p.square().sum() for p in self.model[0].parameters())


def penalty_of_an_object() -> Arguments:
    model = network()
    return training(model, rows(8, 4), rows(8, 4), PenaltyWithin(model), schedule="zb-h1")


class Uncertainty(nn.Module):
    """A loss that learns its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * torch.exp(-self.log_variance) + self.log_variance


def learned_uncertainty(around: bool) -> Arguments:
    loss = Uncertainty()
    return training(network(), rows(8, 4), rows(8, 4), (lambda o, t: loss(o, t)) if around else loss)


# Targets in lists, one entry per sample.


def listed(target: Any, loss: Any, samples: int = 4) -> Arguments:
    return training(network(), rows(samples, 4), target, loss, microbatches=2)


def of_texts(output: Tensor, target: Any) -> Any:
    return sum((row - len(text)).pow(2).mean() for row, text in zip(output, target, strict=False)) / len(output)


def of_numbers(output: Tensor, target: Any) -> Any:
    parts = (F.cross_entropy(row[None], torch.tensor([t])) for row, t in zip(output, target, strict=False))
    return sum(parts) / len(output)


def of_points(output: Tensor, target: Any) -> Any:
    return sum((row - points.mean()).pow(2).mean() for row, points in zip(output, target, strict=False)) / len(output)


# Samples that are not independent, or not in dimension 0.


def default_layout() -> Arguments:
    layers = (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(3))
    model = nn.Sequential(nn.Embedding(11, 8), *layers, nn.Linear(8, 11)).double()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    tokens = torch.randint(11, (8, 6))
    return training(model, tokens, tokens.flip(0), loss, microbatches=2)


class Bags(nn.Module):
    """Sums packed tokens by their offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.chain = nn.Embedding(11, 8, dtype=torch.float64), Chain()
        self.head = nn.Linear(8, 1, dtype=torch.float64)

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[0]).unsqueeze(1)
        own = (places >= offsets[:-1]) & (places < offsets[1:])
        return self.head(self.chain((own.to(torch.float64) @ own.to(torch.float64).T) @ self.embedding(tokens)))


def packed_tokens() -> Arguments:
    inputs = torch.randint(11, (24,)), torch.tensor([0, 7, 9, 18, 24])
    options = {"sample": (inputs[0][:6], inputs[1]), "microbatches": 2}
    return training(Bags(), inputs, rows(24, 1), **options)


class BatchMean(Block):
    """A block that knows the mean of its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output @ target.T, torch.arange(len(output)))


# A loss that is a mean over something other than samples.


def ignored_labels(loss: Any) -> Arguments:
    model = nn.Sequential(nn.Embedding(11, 8), Block(), Block(), nn.Linear(8, 11, dtype=torch.float64)).double()
    tokens, target = torch.randint(11, (8, 6)), torch.randint(11, (8, 6))
    target[1:3, 2:] = target[6:, :5] = -100
    return training(model, tokens, target, loss)


def flat_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


def weighted_classes() -> Arguments:
    labels = torch.tensor([0, 1, 2, 3, -100, 0, -100, -100, 1, 2, -100, -100])
    weights = torch.tensor([0.3, 1.0, 2.0, 5.0], dtype=torch.float64)
    return training(network(), rows(12, 4), labels, nn.CrossEntropyLoss(weight=weights, ignore_index=-100))


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    mask = target > 0
    return ((output - target).square() * mask).sum() / mask.sum().clamp(min=1)


def dice(output: Tensor, target: Tensor) -> Tensor:
    probabilities, mask = output.sigmoid(), (target > 0).double()
    return 1 - 2 * (probabilities * mask).sum() / (probabilities.sum() + mask.sum())


# Gradients that a function of autograd adds.


class AuxiliaryLoss(torch.autograd.Function):
    """Adds the gradient of an auxiliary loss on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor) -> Tensor:
        ctx.save_for_backward(auxiliary)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (auxiliary,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(auxiliary)


class Auxiliary(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return AuxiliaryLoss.apply(y, 0.01 * self.a.weight.square().sum())  # type: ignore[no-any-return]


# What leaves or enters a block by another way than arguments and results.


def left_gradients() -> Arguments:
    arguments = chained(Chain())
    model, (inputs, _) = arguments["model"], arguments["batches"][0]
    model(inputs).sum().backward()
    return arguments


class ReturnsNumber(Block):
    def forward(self, x: Tensor, k: int = 0) -> Any:
        y = super().forward(x).roll(k, 1)
        return y, int(y.sum().item() * 100) % 8


class PassesNumber(Chain):
    def forward(self, x: Tensor) -> Tensor:
        out: Any = (x,)
        for block in self.blocks:
            out = block(*out)
        found: Tensor = out[0]
        return found


class Freezes(Chain):
    def forward(self, x: Tensor) -> Tensor:
        later = self.blocks[2:]
        later.requires_grad_(False)
        x = super().forward(x)
        later.requires_grad_(True)
        return x


class Twin(Chain):
    """Subtracts what an average of its own blocks, which its forward updates, makes of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = copy.deepcopy(self.blocks).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, average in zip(self.blocks.parameters(), self.twin.parameters(), strict=True):
                average.lerp_(own, 0.1)
            y = x
            for block in self.twin:
                y = block(y)
        return super().forward(x) - y


class Attributed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * getattr(self.a.weight, "scale", 1.0))


def attributes() -> Arguments:
    model = Chain(Attributed)
    for block in model.blocks:
        block.a.weight.scale = 0.3  # type: ignore[union-attr]
    return chained(model)


class Bound(Block):
    def __init__(self) -> None:
        super().__init__()
        self.function = functools.partial(F.linear, weight=self.a.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.function(x)))


def bound() -> Arguments:
    model = Chain()
    model.blocks[3] = Bound()
    return chained(model)


class Shared(Block):
    """Calls `act` with what blocks share, what it has got, and what it has computed."""

    def __init__(self, shared: Any, act: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.shared, self.act = shared, act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.shared, x, super().forward(x))


def clock(sequential: bool) -> Arguments:
    shared = types.SimpleNamespace(t=0)

    def tick(shared: Any, x: Tensor, y: Tensor) -> Tensor:
        shared.t += 1
        return y

    blocks = [Shared(shared, tick), Block(), Block(), Shared(shared, lambda shared, x, y: y / shared.t)]
    model = Chain()
    model.blocks = nn.ModuleList(blocks)
    # In a loop with the whole batch the clock ticks once in a step.
    return chained(nn.Sequential(*blocks) if sequential else model, accumulation=True)


def gate() -> Arguments:
    shared: dict[str, Tensor] = {}

    def keep(shared: Any, x: Tensor, y: Tensor) -> Tensor:
        shared["gate"] = torch.sigmoid(x.mean(1, keepdim=True))
        return y

    last = Shared(shared, lambda shared, x, y: y * shared["gate"])
    return chained(nn.Sequential(Shared(shared, keep), Block(), Block(), last))


class WarmsUp(Block):
    """Has half of its strength in the first calls; a function counts them."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        box = types.SimpleNamespace(n=0)

        def strength() -> float:
            box.n += 1
            return 0.5 if box.n <= calls else 1.0

        self.strength = strength

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.strength()


def warm_up(sequential: bool) -> Arguments:
    model = Chain()
    model.blocks[1] = WarmsUp(12)
    return chained(nn.Sequential(*model.blocks) if sequential else model, accumulation=True)


def optimized(optimizer: Any) -> Arguments:
    return training(network(), rows(8, 4), rows(8, 4), optimizer=optimizer)


_CASES: Mapping[str, Callable[[], Arguments]] = {
    "loss_fn: squares of all weights, zb-h1": lambda: penalty(2, "zb-h1"),
    "loss_fn: absolute values of all weights, zb-h1": lambda: penalty(1, "zb-h1"),
    "loss_fn: an object that holds the model, zb-h1": penalty_of_an_object,
    "loss_fn: squares of all weights, 1f1b-flush": lambda: penalty(2, "1f1b-flush"),
    "loss_fn: a learned uncertainty": lambda: learned_uncertainty(around=False),
    "loss_fn: a learned uncertainty, in a lambda": lambda: learned_uncertainty(around=True),
    "target: a list of texts": lambda: listed(["a", "bb", "cccc", "dddddddd"], of_texts),
    "target: a list of numbers": lambda: listed([0, 1, 2, 3], of_numbers),
    "target: a list of tensors": lambda: listed([rows(length) for length in (3, 4, 2, 5)], of_points),
    "samples: in dimension 1 of an encoder": default_layout,
    "samples: packed tokens with offsets": packed_tokens,
    "samples: a mean over the batch": lambda: chained(Chain(BatchMean)),
    "samples: a contrastive loss": lambda: chained(Chain(), loss_fn=contrastive),
    "loss: labels of -100, own function": lambda: ignored_labels(flat_cross_entropy),
    "loss: labels of -100 and weights of classes": weighted_classes,
    "loss: a mean over a mask": lambda: chained(Chain(), loss_fn=masked_mean),
    "loss: dice": lambda: chained(Chain(), loss_fn=dice),
    "optimizer: a counter in the group": lambda: optimized(GroupCounter),
    "optimizer: a counter of its own": lambda: optimized(OwnCounter),
    "optimizer: a norm of all gradients": lambda: optimized(GlobalNorm),
    "gradients: an auxiliary loss in a Function": lambda: chained(Chain(Auxiliary)),
    "gradients: left in .grad": left_gradients,
    "blocks: an int that a block returns": lambda: chained(PassesNumber(ReturnsNumber), accumulation=True),
    "blocks: frozen for the call": lambda: chained(Freezes()),
    "blocks: a twin that the root averages": lambda: chained(Twin(), accumulation=True),
    "blocks: an attribute of a parameter": attributes,
    "blocks: a function bound to a weight": bound,
    "blocks: a clock that two blocks share": lambda: clock(sequential=False),
    "blocks: a clock that two share, nn.Sequential": lambda: clock(sequential=True),
    "blocks: a gate in a dict, nn.Sequential": gate,
    "blocks: a counter in a closure": lambda: warm_up(sequential=False),
    "blocks: a counter in a closure, nn.Sequential": lambda: warm_up(sequential=True),
}
FOUND: tuple[Found, ...] = tuple(Found(name, make) for name, make in _CASES.items())
