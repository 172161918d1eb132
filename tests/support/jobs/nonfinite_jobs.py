"""Jobs in which some losses are not finite."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import penstock
from support.training import Case, Outcome

BAD = 2
"""The number of the batch with a NaN in it."""


def poisoned_batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    """The batches of `case`, twice, with one that is bad."""
    batches = [(x.clone(), y) for x, y in case.batches * 2]
    batches[BAD][0][1] = torch.nan
    return batches


def run_poisoned(case: Case, **options: Any) -> tuple[Outcome, int]:
    """What is left of a training with ``on_nonfinite="skip"``, and how many updates were left out."""
    pipe = penstock.Pipeline(case.build(), **case.options, on_nonfinite="skip", **options)
    losses = []
    for number, (x, y) in enumerate(poisoned_batches(case)):
        losses.append(pipe.step(x, y).loss)
        if number in case.drain_after:
            pipe.drain()
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    outcome = Outcome(tuple(float(loss) for loss in losses), state)
    skipped = pipe.skipped_updates
    pipe.close()
    return outcome, skipped


def run_until_poisoned(case: Case) -> tuple[int, str]:
    """How many steps came before the error, and the error."""
    pipe = penstock.Pipeline(case.build(), **{**case.options, "loss_fn": F.cross_entropy})
    steps = 0
    try:
        for x, y in poisoned_batches(case):
            float(pipe.step(x, y).loss)
            steps += 1
    except penstock.PenstockError as error:
        return steps, str(error)
    return steps, ""


@dataclass(frozen=True)
class Rollback:
    """A training of `case` that goes back when it meets the bad batch. It is saved after `saved` steps."""

    case: Case
    saved: int = BAD
    wait: bool = True
    """Whether saves stop the training."""

    @property
    def seen(self) -> list[tuple[Tensor, Tensor]]:
        """The batches that count in the end: those since the last checkpoint before the bad one are left out."""
        batches = poisoned_batches(self.case)
        return batches[: self.saved] + batches[BAD + 1 :]


def run_rollback(job: Rollback, directory: str) -> tuple[Outcome, int]:
    """What is left of the training, with the losses of the steps that count, and how often it went back."""
    case, losses = job.case, list[float]()
    pipe = penstock.Pipeline(case.build(), **case.options, on_nonfinite="rollback", resume=directory)
    for x, y in poisoned_batches(case):
        losses.append(float(pipe.step(x, y).loss))
        del losses[pipe.steps :]
        if pipe.steps == job.saved and not pipe.rollbacks:
            pipe.save(directory) if job.wait else pipe.save(directory, wait=False)
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    found = Outcome(tuple(losses), state), pipe.rollbacks
    pipe.close()
    return found


def run_rollbacks(jobs: list[Rollback], directory: str) -> list[tuple[Outcome, int]]:
    """Several, one after the other, in the present process group."""
    return [run_rollback(job, f"{directory}/{number}") for number, job in enumerate(jobs)]
