"""Models drawn at random out of habits that one by one are easy: state, sharing, views, writes in place, hooks, modes.

What is wrong with a combination of them shows in a few of hundreds. A model is a value, `DrawnModel`: hypothesis finds
the smallest one that fails, and what it prints can be pasted into a test.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH = 6


class Counting(nn.Module):
    """Divides by the number of its calls in training, which it keeps in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.linear(x) / (1 + 0.1 * self.calls)


class Averaging(nn.Module):
    """Assigns a new tensor to a buffer."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y - self.average


class WritesInput(nn.Module):
    """Writes what it is given in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x *= 0.9
        return x * self.weight


class WritesResult(nn.Module):
    """Writes its own result in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y.mul_(0.5).add_(x)


class OtherInEvaluation(nn.Module):
    """Computes something else in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if self.training else 0.5 * y


class PartlyUsed(nn.Module):
    """Has a layer without gradients, and one that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.fixed, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.fixed(x)
        result: Tensor = self.used(x) + shift
        return result


def _hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(lambda module, args, output: 1.5 * output)
    layer.register_forward_pre_hook(lambda module, args: (0.7 * args[0],))
    layer.weight.register_hook(lambda gradient: 0.5 * gradient)
    return layer


def _post_hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)

    def mark(parameter: Tensor) -> None:
        layer.bias.has_gradient = True  # type: ignore[attr-defined]

    # It does nothing that depends on how often it is called: once for every microbatch.
    layer.bias.register_post_accumulate_grad_hook(mark)
    return layer


class MarkedParameter(nn.Module):
    """Reads an attribute of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.factor = 0.3  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) * getattr(self.linear.weight, "factor", 1.0)
        return result


class HeldElsewhere(nn.Module):
    """Has its weight in a function, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.project = partial(F.linear, weight=self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) + self.linear.bias


class SlottedCount:
    """A count that is in no ``__dict__``."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class CountingInSlots(nn.Module):
    """Keeps the number of its calls in training in an object with slots."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), SlottedCount()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.count += self.training
        return self.linear(x) * (0.5 if self.calls.count <= 5 else 1.0)


class Ticking(nn.Module):
    """Moves and reads a clock that other blocks may share."""

    def __init__(self, clock: SimpleNamespace) -> None:
        super().__init__()
        self.linear, self.clock = nn.Linear(WIDTH, WIDTH), clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.ticks += self.training
        return self.linear(x) / (1 + 0.1 * self.clock.ticks)


BLOCKS: Mapping[str, Callable[[], nn.Module]] = {
    "counting": Counting,
    "averaging": Averaging,
    "writes input": WritesInput,
    "writes result": WritesResult,
    "other in evaluation": OtherInEvaluation,
    "partly used": PartlyUsed,
    "hooked": _hooked,
    "post hooked": _post_hooked,
    "marked parameter": MarkedParameter,
    "held elsewhere": HeldElsewhere,
    "slots": CountingInSlots,
    "identity": nn.Identity,
    "flatten": nn.Flatten,
    "tanh": nn.Tanh,
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "nested": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
}
BETWEEN = "-rfsnvwmgd"
"""Code between blocks, a letter each: see `GluedModel`."""


class GluedModel(nn.Module):
    """Calls `blocks` one after the other, with code of its own between them, one letter of `between` each."""

    def __init__(self, blocks: Sequence[nn.Module], between: str) -> None:
        super().__init__()
        self.blocks, self.between = nn.ModuleList(blocks), between
        self.scale, self.norm = nn.Parameter(torch.ones(WIDTH)), nn.LayerNorm(WIDTH)
        self.register_buffer("table", torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for block, kind in zip(self.blocks, self.between, strict=True):
            y = block(x)
            match kind:
                case "r":
                    y = y + x
                case "f":
                    y = y + first
                case "s":
                    y = y * self.scale + self.table
                case "n":
                    y = self.norm(y)
                case "v":
                    y = y.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(y.shape)
                case "w":
                    y = y.clone()
                    y[:, ::2] += 1
                case "m":
                    y = y if self.training else 0.5 * y
                case "g":
                    with torch.no_grad():
                        shift = 0.3 * y
                    y = y + shift
                case "d":
                    y = torch.where(y > 0, y, F.dropout(y, 0.0, self.training))
            x = y
        result: Tensor = self.head(x)
        return result


@dataclass(frozen=True)
class DrawnModel:
    """A model of blocks in one of three forms."""

    form: str
    """``module`` (with code of its own), ``sequential`` or ``list``."""
    blocks: tuple[str | int, ...]
    """Names in `BLOCKS`; a number stands for the block at that place once more; ``clock``: all share a clock."""
    between: str = ""
    """The code behind each block, of a ``module``."""
    tied: bool = False
    """Whether the first two linear blocks share their weight."""

    def make(self) -> nn.Module | list[nn.Module]:
        torch.manual_seed(0)
        blocks: list[nn.Module] = []
        clock = SimpleNamespace(ticks=0)
        for block in self.blocks:
            if isinstance(block, int):
                blocks.append(blocks[block])
            else:
                blocks.append((Ticking(clock) if block == "clock" else BLOCKS[block]()).double())
        linear = [block for block, name in zip(blocks, self.blocks, strict=True) if name == "linear"]
        if self.tied and len(linear) > 1:
            linear[1].weight = linear[0].weight
        if self.form == "module":
            return GluedModel(blocks, self.between).double()
        blocks.append(nn.Linear(WIDTH, WIDTH).double())
        return nn.Sequential(*blocks) if self.form == "sequential" else blocks


@st.composite
def drawn_models(draw: st.DrawFn) -> DrawnModel:
    """Models of three to eight blocks; the plainest first, so that a failing one shrinks to few habits."""
    names = st.sampled_from(["linear", "tanh", "layer norm"] * 8 + list(BLOCKS) + ["clock"])
    blocks: list[str | int] = []
    for place in range(draw(st.integers(3, 8))):
        blocks.append(draw(names | st.integers(0, place - 1) if place else names))
    form = draw(st.sampled_from(["sequential", "list", "module"]))
    between = "".join(draw(st.sampled_from(BETWEEN)) for _ in blocks) if form == "module" else ""
    return DrawnModel(form, tuple(blocks), between, draw(st.booleans()))


def as_module(model: Any) -> nn.Module:
    """`model`, of which a list is an `nn.Sequential`, with the same names."""
    return nn.Sequential(*model) if isinstance(model, list) else model
