"""Training with metrics: in the test's process, and in those of the pool."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

import penstock
from support.training import Case


def with_accuracy(output: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """A tensor and a number beside the loss."""
    loss = F.cross_entropy(output, y)
    return loss, {"accuracy": (output.argmax(-1) == y).double().mean(), "entropy": loss.item()}


def losses_and_metrics(case: Case) -> list[tuple[float, dict[str, float]]]:
    """The losses and metrics of every step, and of an evaluation."""
    pipe = penstock.Pipeline(case.build(), **{**case.options, "loss_fn": with_accuracy})
    results = [*(pipe.step(x, y) for x, y in case.batches), pipe.evaluate(*case.batches[0])]
    found = [(float(result.loss), dict(result.metrics)) for result in results]
    pipe.close()
    return found
