"""Jobs for the processes of the pipeline's tests."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import penstock
from support import models

SUBJECT = models.SUBJECTS["normalized"]


def _make(subject: models.Subject = SUBJECT, **options: Any) -> penstock.Pipeline:
    arguments = {"sample": subject.sample, "loss_fn": F.cross_entropy, "optimizer": models.momentum}
    return penstock.Pipeline(subject.build(), **{**arguments, **options})


def losses_everywhere(schedule: str) -> list[float]:
    """The losses that this rank sees, read late."""
    pipe = _make(schedule=schedule, microbatches=3)
    losses = [pipe.step(x, y).loss for x, y in SUBJECT.batches]
    pipe.drain()
    numbers = [float(loss) for loss in losses]
    pipe.close()
    return numbers


def evaluate_and_predict() -> tuple[float, Tensor]:
    """After a step: the evaluation loss and the prediction that this rank sees. In one process, of three stages."""
    alone = {} if dist.is_initialized() else {"stages": 3}
    pipe = _make(schedule="2bw", microbatches=3, **alone)
    x, y = SUBJECT.batches[0]
    pipe.step(x, y)
    loss, output = float(pipe.evaluate(x[:7], y[:7]).loss), pipe.predict(x[:7])
    pipe.close()
    return loss, output


def save_checkpoint(directory: str) -> list[float]:
    """Two steps, a checkpoint, and the losses of the steps after it."""
    pipe = _make(schedule="2bw", microbatches=4, optimizer=models.adamw)
    for x, y in SUBJECT.batches[:2]:
        pipe.step(x, y)
    pipe.save(directory)
    return _finish(pipe)


def load_checkpoint(directory: str) -> list[float]:
    """The losses of the steps after the checkpoint."""
    pipe = _make(schedule="2bw", microbatches=4, optimizer=models.adamw, seed=5)
    pipe.load(directory)
    return _finish(pipe)


REPLICATED = penstock.Plan((penstock.Stage(0, 5, (2, 0)), penstock.Stage(5, 8, (1,))), "2bw", 4)
"""Two replicas of the first stage, the first of them on the last rank."""


def train_replicated(directory: str) -> tuple[list[float], Tensor, float, list[float]]:
    """The losses of two steps, a prediction and an evaluation, then a checkpoint and the losses after it."""
    pipe = _make(models.LAYERED, plan=REPLICATED, optimizer=models.adamw)
    losses = [pipe.step(x, y).loss for x, y in models.LAYERED.batches[:2]]
    x, y = models.LAYERED.batches[0]
    output, evaluated = pipe.predict(x[:7]), float(pipe.evaluate(x[:7], y[:7]).loss)
    pipe.save(directory)
    return [float(loss) for loss in losses], output, evaluated, _finish(pipe)


def load_replicated(directory: str, plan: penstock.Plan = REPLICATED) -> tuple[float, list[float]]:
    """An evaluation of the checkpoint, and the losses after it."""
    pipe = _make(models.LAYERED, plan=plan, optimizer=models.adamw, seed=5)
    pipe.load(directory)
    x, y = models.LAYERED.batches[0]
    return float(pipe.evaluate(x[:7], y[:7]).loss), _finish(pipe)


def _finish(pipe: penstock.Pipeline) -> list[float]:
    losses = [float(pipe.step(x, y).loss) for x, y in SUBJECT.batches[2:]]
    pipe.drain()
    pipe.close()
    return losses


def _refusal(**options: Any) -> str:
    try:
        _make(**options)
    except penstock.PlanError as error:
        return str(error)
    return "built"


def build_with_other_weights() -> str:
    """Each rank seeds differently."""
    torch.manual_seed(dist.get_rank())
    model = models.Perceptron().double()
    try:
        penstock.Pipeline(model, sample=SUBJECT.sample, loss_fn=F.cross_entropy, optimizer=models.momentum)
    except penstock.PlanError as error:
        return str(error)
    return "built"


def build_with_other_plans() -> str:
    """Each rank plans differently."""
    cut = 1 + dist.get_rank()
    return _refusal(plan=penstock.Plan((penstock.Stage(0, cut, (0,)), penstock.Stage(cut, 8, (1,)))))


def build_for_three() -> str:
    """Two processes, and a plan of three."""
    return _refusal(plan=penstock.Plan.uniform(8, 3))


def build_four_stages() -> str:
    """Two processes, four stages."""
    return _refusal(stages=4)
