"""Jobs for the processes of the tests of ``plan="auto"``."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.values import Cluster, Plan, Profile
from support import models

__all__ = [
    "Automatic",
    "build_with_a_layer_that_cannot_be_measured",
    "build_with_other_wishes",
    "listening",
    "run_automatically",
]


@dataclass(frozen=True)
class Automatic:
    """What a run with ``plan="auto"`` chose, and what came of it."""

    plan: Plan
    profile: Profile | None
    """None where the plan was given."""
    cluster: Cluster | None
    losses: tuple[float, ...]
    state: dict[str, Tensor]
    error: float | None
    lines: tuple[str, ...]
    """What was logged on this rank."""


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collects what is logged meanwhile, level and message."""
    logger, handler = logging.getLogger("penstock"), _Lines()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def run_automatically(subject: str, steps: int, options: dict[str, Any], awaits_comparison: bool = False) -> Automatic:
    """Trains `subject` for `steps` steps under a plan of Penstock's own."""
    chosen = models.SUBJECTS[subject]
    with listening() as lines:
        pipe = penstock.Pipeline(
            chosen.build(),
            sample=chosen.sample,
            loss_fn=chosen.loss_fn,
            optimizer=models.momentum,
            seed=3,
            **{"plan": "auto", **options},
        )
        losses = [pipe.step(*chosen.batches[step % len(chosen.batches)]).loss for step in range(steps)]
        pipe.drain()
        numbers = tuple(float(loss) for loss in losses)
        error = pipe.prediction_error()
        # A thread of each process writes and reads the measurements.
        deadline = time.monotonic() + 60.0
        while awaits_comparison and error is None and time.monotonic() < deadline:
            time.sleep(0.005)
            error = pipe.prediction_error()
        if dist.is_initialized():
            # No process closes before the others have read.
            dist.barrier()
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    pipe.close()
    auto = pipe.auto_plan
    profile, cluster = (None, None) if auto is None else (auto.profile, auto.cluster)
    return Automatic(pipe.plan, profile, cluster, numbers, state, error, tuple(lines))


class _Wearing(nn.Linear):
    """A layer that fails from its tenth forward on: it is captured with fewer, and measured with more."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards >= 10:
            raise ValueError("the layer is worn out")
        return super().forward(x)


def _refusal(model: nn.Module | list[nn.Module], **options: Any) -> str:
    try:
        penstock.Pipeline(
            model, sample=(torch.randn(3, 6),), loss_fn=F.cross_entropy, optimizer=models.momentum, **options
        )
    except penstock.PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def build_with_a_layer_that_cannot_be_measured() -> str:
    """The profile on rank 0 fails."""
    torch.manual_seed(0)
    return _refusal([nn.Linear(6, 6), _Wearing(6, 6), nn.Linear(6, 3)], plan="auto")


def build_with_other_wishes() -> str:
    """Each rank wants another schedule."""
    torch.manual_seed(0)
    return _refusal(models.Perceptron(), plan="auto", schedule=("gpipe", "1f1b-flush")[dist.get_rank()])
