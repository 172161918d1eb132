"""Models that ranks capture together, which count how often capture runs them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.capturing.doors import capture_unchecked
from penstock.errors import PenstockError
from penstock.runtime.assembly.captured_models import check_together
from penstock.runtime.transport.worlds import join_world

__all__ = ["KINDS", "Found", "check_with_others", "error_of", "find_alone", "sample"]

WIDTH = 4
RUNS: list[None] = []
"""One for every run of the first block in this process."""


class Block(nn.Module):
    """Counts its runs in what no model holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(None)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Summed(Block):
    """Waits for the other ranks in every run."""

    def compute(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if dist.is_initialized():
            dist.all_reduce(y.detach().clone())
        return y


class Drawing(Block):
    """Has a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()


class Joined(Block):
    """Waits for the other ranks whenever its gradient is computed."""

    def __init__(self) -> None:
        super().__init__()

        def join(gradient: Tensor) -> None:
            if dist.is_initialized():
                dist.all_reduce(gradient.detach().clone())

        self.layer.weight.register_hook(join)


class Failing(Block):
    """Fails where gradients are computed, which capture does first when it checks."""

    def compute(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise ArithmeticError("no gradients here")
        return self.layer(x)


class Model(nn.Module):
    """A block, and code around it that does something else for one step, and that needs as many weights as steps.

    `scale`: a number in its code.
    """

    def __init__(self, block: type[Block] = Block, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.scale = block(), scale
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """`x`: (samples, steps, width); `weights`: (samples, steps)."""
        y: Tensor = self.last(self.block(x) * weights.unsqueeze(-1) * self.scale)
        return 2 * y if x.shape[1] == 1 else y


class Stateful(Model):
    """Reads a number between its blocks that other code changes: what is traced is wrong in the next run."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, weights) * len(RUNS)


class Undifferentiable(Model):
    """Leaves PyTorch between its blocks, which is refused before anything is checked."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, weights) + float(self.block(x).sum())


KINDS: dict[str, Any] = {
    "plain": Model,
    "other number": lambda: Model(scale=3.0),
    "summed": lambda: Model(Summed),
    "drawing": lambda: Model(Drawing),
    "joined": lambda: Model(Joined),
    "failing": lambda: Model(Failing),
    "stateful": Stateful,
    "refused": Undifferentiable,
}


@dataclass(frozen=True, slots=True)
class Found:
    """A capture in one process."""

    runs: int
    """Of the first block, while the checks ran."""
    sizes: Any
    equal: Any


def sample() -> tuple[Tensor, Tensor]:
    """Two samples of five steps."""
    return torch.ones(2, 5, WIDTH), torch.ones(2, 5)


def find_alone(kind: str) -> Found:
    """What a process finds that runs all checks itself."""
    unchecked = capture_unchecked(KINDS[kind](), sample())
    before = len(RUNS)
    inputs = unchecked.checked().inputs
    return Found(len(RUNS) - before, inputs.sizes, inputs.equal)


def check_with_others(*kinds: str) -> Found:
    """The same with the other ranks; each rank captures the model of its kind."""
    world = join_world(60.0)
    RUNS.clear()
    try:
        unchecked = capture_unchecked(KINDS[kinds[world.rank]](), sample())
        before = len(RUNS)
        inputs = check_together(world, unchecked).inputs
        return Found(len(RUNS) - before, inputs.sizes, inputs.equal)
    finally:
        world.announce_leave()
        world.leave()


def error_of(*kinds: str) -> str:
    """The error of a pipeline of the model of this rank's kind."""
    RUNS.clear()
    try:
        penstock.Pipeline(
            KINDS[kinds[dist.get_rank()]](),
            sample(),
            F.mse_loss,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            plan=penstock.Plan.uniform(2, 2, "1f1b-flush", 2),
            timeout_seconds=60.0,
        )
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    except ArithmeticError as error:
        return f"its own: {error}"
    return ""
