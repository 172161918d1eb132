"""The jobs that benchmarks give to all contenders alike: a model and its layers, a batch, the loss and the optimizer.

*big* is dominated by computing (a stage of two takes about 30 ms for a microbatch, forward and backward), *medium*
takes about 8 ms, *tiny* 1.5 ms, and *nano* is four layers of 0.02 ms: nothing but what the library adds.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from train_gpt import BYTES, GPT
from train_gpt import loss_fn as nats_per_byte

MICROBATCH_SIZE = 2
LEARNING_RATE = 1e-3
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Language:
    """The GPT of examples/train_gpt.py, in microbatches of `MICROBATCH_SIZE` samples. All jobs have these methods."""

    width: int
    heads: int
    blocks: int
    context: int

    @property
    def cut_bytes(self) -> int:
        """The bytes of the activation of a microbatch between two layers; its gradient has as many."""
        return MICROBATCH_SIZE * self.context * self.width * FLOAT_BYTES

    def build(self) -> GPT:
        """The model, every time with the same weights."""
        torch.manual_seed(0)
        return GPT(self.context, self.width, self.heads, self.blocks)

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """The layers that Penstock cuts `model` between, in order."""
        assert isinstance(model, GPT)
        return [model.embedding, *model.blocks, model.head]

    def cuts(self, stages: int) -> list[int]:
        """Where stages of equal cost begin, and where the last one ends. `ValueError` if there are too few layers."""
        # The embedding and the head cost little beside a block, and go with the first and the last ones.
        inner = [1 + cut for cut in even_cuts(self.blocks, stages)[1:-1]]
        return [0, *inner, self.blocks + 2]

    def share(self, processes: int) -> "Language":
        """A job of a stage's size: about a `processes`-th of this one."""
        return replace(self, blocks=max(1, self.blocks // processes))

    def rehearsal(self) -> "Language":
        """A job of the same form that takes next to no memory."""
        return replace(self, width=2 * self.heads, context=4)

    def batch(self, microbatches: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        windows = torch.randint(BYTES, (microbatches * MICROBATCH_SIZE, self.context + 1), generator=generator)
        # torch 2.11's pipelining wants inputs without gaps.
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nats_per_byte(output, target)


@dataclass(frozen=True, slots=True)
class Linears:
    """Linear layers in a row."""

    width: int
    depth: int

    @property
    def cut_bytes(self) -> int:
        return MICROBATCH_SIZE * self.width * FLOAT_BYTES

    def build(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.depth)))

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def cuts(self, stages: int) -> list[int]:
        return even_cuts(self.depth, stages)

    def share(self, processes: int) -> "Linears":
        return replace(self, depth=max(1, self.depth // processes))

    def rehearsal(self) -> "Linears":
        return replace(self, width=2)

    def batch(self, microbatches: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(2, microbatches * MICROBATCH_SIZE, self.width, generator=generator)
        return x, y

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)


@dataclass(frozen=True, slots=True)
class Placed:
    """`job` on `device`, in microbatches of `samples` samples, a multiple of `MICROBATCH_SIZE`."""

    job: Language | Linears
    device: torch.device
    samples: int

    @property
    def cut_bytes(self) -> int:
        return self.job.cut_bytes * self.samples // MICROBATCH_SIZE

    def build(self) -> nn.Module:
        # Where it is to be: a large model takes the host seconds to fill, and the device none.
        with self.device:
            return self.job.build()

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return self.job.layers(model)

    def cuts(self, stages: int) -> list[int]:
        return self.job.cuts(stages)

    def share(self, processes: int) -> "Placed":
        return replace(self, job=self.job.share(processes))

    def rehearsal(self) -> "Placed":
        return replace(self, job=self.job.rehearsal())

    def batch(self, microbatches: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.job.batch(microbatches * self.samples // MICROBATCH_SIZE)
        return inputs.to(self.device), target.to(self.device)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.job.loss(output, target)


Job = Language | Linears | Placed
JOBS: dict[str, Language | Linears] = {
    "big": Language(256, 8, 8, 64),
    "medium": Language(128, 4, 8, 64),
    "tiny": Language(64, 4, 4, 32),
    "nano": Linears(32, 4),
}


def even_cuts(layers: int, stages: int) -> list[int]:
    """Where each of `stages` begins that share `layers` evenly, and `layers`; the earlier ones take the remainder."""
    if layers < stages:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages")
    short, longer = divmod(layers, stages)
    return list(accumulate((short + (stage < longer) for stage in range(stages)), initial=0))


def plain_microbatch(job: Job) -> Callable[[], object]:
    """A forward and backward of a microbatch of `job`, in a plain loop, which adds up gradients."""
    model, (inputs, target) = job.build(), job.batch(1)
    assert len(inputs) == MICROBATCH_SIZE
    return lambda: job.loss(model(inputs), target).backward()


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain, as cheap as an optimizer can be."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


@dataclass(frozen=True, slots=True)
class Setting:
    """A job for a number of processes and of microbatches per step."""

    job: Job
    processes: int
    microbatches: int
    own_weights: bool = False
    """Whether processes make the weights of their own stages only, which the library's users with large models do."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = sgd
    autocast: torch.dtype | None = None
    """The type that forwards and losses compute in, if it is not that of the weights."""
