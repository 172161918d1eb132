"""First steps on batches that are not what a pipeline takes them for, in several processes."""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def tokens(length: int, width: int) -> Tensor:
    return torch.randint(0, 11, (length, width), generator=torch.Generator().manual_seed(1))


def layout() -> nn.Sequential:
    """An encoder in PyTorch's default layout: the samples are in dimension 1."""
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(3))
    return nn.Sequential(nn.Embedding(11, 8), *layers, nn.Linear(8, 11)).double()


def ragged() -> nn.Sequential:
    """A model of tokens, each by itself."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11)).double()


def labels() -> Tensor:
    """Labels of 8 samples, of which some end earlier."""
    return tokens(8, 6).masked_fill(torch.arange(6) >= torch.tensor([6, 3, 2, 5, 4, 4, 1, 6])[:, None], -100)


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "first" in record.getMessage() or record.levelno >= logging.WARNING:
            self.texts.append(f"{record.levelname} {record.getMessage()}")


def first_step(
    model: Any, sample: Any, batch: Any, target: Any, loss_fn: Any, *, only_here: int | None = None, **options: Any
) -> tuple[list[str], str]:
    """What the first two steps log, and the error of the first one; empty if there is none.

    `only_here`: the rank that has the target; the others pass None.
    """
    made = model() if callable(model) and not isinstance(model, nn.Module) else model
    records = _Records()
    log = logging.getLogger("penstock")
    level = log.level
    log.addHandler(records)
    log.setLevel(logging.INFO)
    try:
        options = {"stages": 2, "microbatches": 2, **options}
        pipe = penstock.Pipeline(made, sample, loss_fn, sgd, **options)
        own = target if only_here in (None, pipe.rank) else None
        pipe.step(batch, own)
        pipe.step(batch, own)
    except penstock.PenstockError as error:
        return records.texts, f"{type(error).__name__}: {error}"
    finally:
        log.removeHandler(records)
        log.setLevel(level)
    return records.texts, ""
