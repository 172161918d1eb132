"""What the convergence study trains: the models of the two examples, cut into four stages, with their data."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import train_gpt

__all__ = ["STAGES", "TASKS", "Batches", "Task", "straight_plan"]

STAGES = 4


@dataclass(frozen=True, slots=True)
class Batches:
    """What a task trains on and what it is judged by."""

    stream: Callable[[torch.Generator], Iterator[tuple[Tensor, Tensor]]]
    """Minibatches without end, from a generator of their own."""
    held_out: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A model with its data. `cuts`: where the stages begin, and the end of the last one."""

    name: str
    title: str
    build: Callable[[], list[nn.Module]]
    read: Callable[[], Batches]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    samples: int
    """In a minibatch."""
    updates: int
    cuts: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]
    """The grid of learning rates by optimizer."""
    longer: dict[str, int]
    """By optimizer, the updates of one more run of some methods, with the first seed at its best rate."""

    @cached_property
    def batches(self) -> Batches:
        """Read once for all runs."""
        return self.read()

    def cuts_for(self, stages: int) -> tuple[int, ...]:
        """The cuts of as many stages: those of the study, or none."""
        return self.cuts if stages > 1 else (0, self.cuts[-1])


def build_gpt() -> list[nn.Module]:
    """The GPT of the main example, with four small blocks, as a chain of layers."""
    model = train_gpt.GPT(context=64, width=48, heads=4, blocks=4)
    return [model.embedding, *model.blocks, model.head]


def read_text() -> Batches:
    """Windows of 64 bytes of the standard library's sources."""
    text, validation = train_gpt.read_text(2_000_000)
    held_out = train_gpt.draw(validation, 64, 64, torch.Generator().manual_seed(1))

    def stream(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield train_gpt.draw(text, GPT.samples, 64, generator)

    return Batches(stream, held_out)


def build_digits() -> list[nn.Module]:
    """The residual network of the digits example, without its dropout: see docs/convergence.md."""
    import train_digits  # brings scikit-learn, which takes seconds

    model = train_digits.ResidualNetwork(width=8)
    head = nn.Sequential(*(layer for layer in model.head if not isinstance(layer, nn.Dropout)))
    return [model.stem, *model.blocks, head]


def read_digits() -> Batches:
    """The pictures in a new random order for each epoch; the last ones of an epoch, too few for a batch, are left."""
    import train_digits

    pictures, labels, test_pictures, test_labels = train_digits.read_digits()

    def stream(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            order = torch.randperm(len(labels), generator=generator)
            for drawn in order[: len(labels) // DIGITS.samples * DIGITS.samples].view(-1, DIGITS.samples):
                yield pictures[drawn], labels[drawn]

    return Batches(stream, (test_pictures, test_labels))


GPT = Task(
    "gpt",
    "GPT on Python sources",
    build_gpt,
    read_text,
    train_gpt.loss_fn,
    samples=16,
    updates=200,
    cuts=(0, 2, 3, 4, 6),
    rates={"sgd": (0.01, 0.03, 0.1, 0.3), "adamw": (1e-3, 3e-3, 1e-2), "muon": (3e-3, 1e-2, 3e-2, 1e-1)},
    longer={"adamw": 600},
)
DIGITS = Task(
    "digits",
    "Residual network on digits",
    build_digits,
    read_digits,
    F.cross_entropy,
    samples=64,
    updates=220,
    cuts=(0, 1, 2, 3, 5),
    rates={"sgd": (0.03, 0.1, 0.3), "adamw": (1e-2, 3e-2, 1e-1)},
    longer={},
)
TASKS = {task.name: task for task in (GPT, DIGITS)}


def straight_plan(
    task: Task, schedule: str, stages: int, microbatches: int, vertical_sync: bool = False
) -> penstock.Plan:
    """The task's stages, one on each rank."""
    cuts = task.cuts_for(stages)
    held = tuple(penstock.Stage(start, stop, (rank,)) for rank, (start, stop) in enumerate(pairwise(cuts)))
    return penstock.Plan(held, schedule, microbatches=microbatches, vertical_sync=vertical_sync)
