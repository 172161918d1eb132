"""Runs of a subject under a schedule: by the pipeline (here or in many processes) and by the oracle."""

import gc
from dataclasses import dataclass, replace

from torch import Tensor, nn

import models
import penstock

__all__ = ["Case", "Outcome", "count_tensors", "run_cases", "run_pipeline", "run_reference"]


LAYERS = 8
"""Of every subject."""


@dataclass(frozen=True)
class Case:
    """One training run. `schedule` 'vertical' is `1f1b` with vertical sync."""

    subject: str
    schedule: str
    ranks: int
    microbatches: int
    optimizer: str = "momentum"
    stages_per_rank: int = 1
    drain_after: tuple[int, ...] = ()
    device: str = "cpu"
    turned: bool = False
    """Whether the first stage is on the last rank, and so on."""

    @property
    def options(self) -> dict[str, object]:
        """The arguments that the pipeline and the oracle share."""
        subject = models.SUBJECTS[self.subject]
        plan = penstock.Plan.uniform(
            LAYERS,
            self.ranks * self.stages_per_rank,
            schedule="1f1b" if self.schedule == "vertical" else self.schedule,
            microbatches=self.microbatches,
            stages_per_rank=self.stages_per_rank,
            vertical_sync=self.schedule == "vertical",
        )
        if self.turned:
            stages = (penstock.Stage(s.start, s.stop, (self.ranks - 1 - s.ranks[0],)) for s in plan.stages)
            plan = replace(plan, stages=tuple(stages))
        return {
            "sample": tuple(tensor.to(self.device) for tensor in subject.sample),
            "loss_fn": subject.loss_fn,
            "optimizer": getattr(models, self.optimizer),
            "plan": plan,
            "seed": 3,
        }

    def build(self) -> nn.Module:
        """The model."""
        return models.SUBJECTS[self.subject].build().to(self.device)

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets."""
        return [(x.to(self.device), y.to(self.device)) for x, y in models.SUBJECTS[self.subject].batches]


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: every loss, and the final weights and buffers (of one rank, or whole)."""

    losses: tuple[float, ...]
    state: dict[str, Tensor]
    evaluated: float | None = None
    """The loss of the first batch after the training, where ranks are `turned`."""


def run_pipeline(case: Case) -> Outcome:
    """The run by `Pipeline`: all ranks here, or this process's part of them."""
    pipe = penstock.Pipeline(case.build(), **case.options)
    losses = []
    for number, (x, y) in enumerate(case.batches):
        losses.append(pipe.step(x, y).loss)
        if number in case.drain_after:
            pipe.drain()
    state = pipe.state_dict()["model"]
    trained = {name: tensor.clone() for name, tensor in state.items()}
    evaluated = float(pipe.evaluate(*case.batches[0]).loss) if case.turned else None
    pipe.close()
    return Outcome(tuple(float(loss) for loss in losses), trained, evaluated)


def count_tensors(case: Case, steps: int) -> list[int]:
    """How many tensors are alive after each of some steps."""
    pipe, batches = penstock.Pipeline(case.build(), **case.options), case.batches
    counts = []
    for step in range(steps):
        x, y = batches[step % len(batches)]
        float(pipe.step(x, y).loss)
        gc.collect()
        counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
    pipe.drain()
    pipe.close()
    return counts


def run_cases(cases: list[Case]) -> list[Outcome]:
    """Several runs, one after the other, in the present process group."""
    return [run_pipeline(case) for case in cases]


def run_reference(case: Case) -> Outcome:
    """The run by the oracle."""
    reference = penstock.reference_train(case.build(), case.batches, drain_after=case.drain_after, **case.options)
    return Outcome(reference.losses, reference.state)
