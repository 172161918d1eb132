"""Training with `wire_dtype=`: in the test's process, and in those of the pool."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock import RowInt8
from penstock.training.wire_codecs import WireDtype
from support import models
from support.exports import built_as
from support.training import Case, Outcome, run_pipeline
from support.transport_selection import sharing_memory

__all__ = ["KINDS", "Masked", "build_with_other_kinds", "masked", "masked_batches", "run_wired"]

KINDS: dict[str, WireDtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32, "rows": RowInt8()}


def run_wired(runs: list[tuple[Case, str]], shared: bool) -> list[Outcome]:
    """The cases, each with its kind of wire, through shared memory or over Gloo."""
    with sharing_memory(shared):
        return [run_pipeline(case, wire_dtype=KINDS[kind]) for case, kind in runs]


class Masking(nn.Module):
    """A block that hands on what it was given of integers and booleans."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, kept: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + torch.tanh(self.linear(x)) * kept + places.to(x) / 2**40
        return x, kept.logical_not(), places * 3 + 2**33


class Masked(nn.Module):
    """Floating numbers, integers beyond 32 bits and booleans cross every cut."""

    def __init__(self, width: int = 6, depth: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masking(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        kept, places = x > 0, (x * 1000).long()
        for block in self.blocks:
            x, kept, places = block(x, kept, places)
        return self.head(x)


def masked() -> nn.Module:
    """The model in float64."""
    torch.manual_seed(3)
    return built_as("masked", Masked().double())


def masked_batches() -> list[tuple[Tensor, Tensor]]:
    """Three batches for it."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, 6, generator=generator).double(), torch.randint(3, (8,), generator=generator)) for _ in range(3)
    ]


def build_with_other_kinds() -> str:
    """Each rank sends in another type."""
    options: dict[str, Any] = {"wire_dtype": [torch.bfloat16, RowInt8()][dist.get_rank()]}
    subject = models.SUBJECTS["perceptron"]
    try:
        penstock.Pipeline(subject.build(), subject.sample, F.cross_entropy, models.momentum, **options)
    except penstock.PenstockError as error:
        return str(error)
    return "built"
