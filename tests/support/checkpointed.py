"""A pipeline whose checkpoints the tests write, read and damage: layers in a row, in two stages, with Adam's state."""

from typing import Any

import torch
import torch.nn.functional as F

import penstock
from support import models

SUBJECT = models.LAYERED


def make(subject: models.Subject = SUBJECT, **options: Any) -> penstock.Pipeline:
    arguments = {"sample": subject.sample, "loss_fn": F.cross_entropy, "optimizer": models.adamw, "stages": 2}
    return penstock.Pipeline(subject.build(), **{**arguments, **options})


def trained(steps: int = 1, **options: Any) -> penstock.Pipeline:
    pipe = make(**options)
    for x, y in SUBJECT.batches[:steps]:
        pipe.step(x, y)
    return pipe


def weights(pipe: penstock.Pipeline) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())
