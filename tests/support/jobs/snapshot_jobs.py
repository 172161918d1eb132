"""Runs that are saved without a stop, and runs that go on from them: by tests, and in the processes of the pool."""

from dataclasses import dataclass
from threading import Event
from typing import Any

import torch

import penstock
from support.jobs.hook_jobs import HOOKED
from support.jobs.scaling_jobs import RISKY, loud, quiet
from support.training import Case, Outcome


def _falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


SCALED = {"loss_fn": loud, "optimizer": quiet, "loss_scale": RISKY}
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_grad_norm": 0.3},
    "scaled": SCALED,
    "scaled and clipped": {**SCALED, "clip_grad_norm": 500.0},
    "scheduled": {"lr_scheduler": _falling},
    "scheduled and scaled": {**SCALED, "lr_scheduler": _falling},
    **{name: HOOKED[name] for name in ("prediction", "dragging", "several", "own", "clipped", "scaled")},
    "hooked and clipped": HOOKED["clipped"],
}
"""Arguments for the pipeline and for the oracle."""


@dataclass(frozen=True)
class Cut:
    """A run of `case` that is saved after `steps` steps without a stop, and what else is done with it."""

    case: Case
    steps: int
    recipe: str = "plain"
    again: int = 0
    """The steps after which the resumed run is saved in the same way and resumed once more; 0 for never."""
    late: bool = False
    """Whether the thread beside the training does nothing before the saved run has ended."""

    @property
    def options(self) -> dict[str, Any]:
        return {**self.case.options, **RECIPES[self.recipe]}

    @property
    def batches(self) -> list[Any]:
        """Enough for a pipe of four stages to be full at the cut, and to be filled again after it."""
        return [*self.case.batches, *self.case.batches]


def run_cut(cut: Cut, directory: str) -> tuple[Outcome, Outcome]:
    """The run that is saved, and that which resumes: with the losses of the steps after the last checkpoint."""
    whole = _run(cut, _build(cut), 0, cut.steps, directory)
    start, place = cut.steps, directory
    if cut.again:
        _run(cut, _resume(cut, place), start, start + cut.again, f"{directory}-again")
        start, place = start + cut.again, f"{directory}-again"
    return whole, _run(cut, _resume(cut, place), start, None, "")


def _build(cut: Cut) -> penstock.Pipeline:
    return penstock.Pipeline(cut.case.build(), check="off", **cut.options)


def _resume(cut: Cut, directory: str) -> penstock.Pipeline:
    pipe = _build(cut)
    # What it has seen so far is forgotten.
    pipe.step(*cut.batches[-1])
    pipe.load(directory)
    return pipe


def _run(cut: Cut, pipe: penstock.Pipeline, start: int, save_after: int | None, directory: str) -> Outcome:
    losses, save, ended = [], None, Event()
    for number, batch in enumerate(cut.batches[start:], start):
        if number == save_after:
            if cut.late:
                pipe._engine.snapshots.copier.submit(ended.wait, 60)
            save = pipe.save(directory, wait=False)
        losses.append(pipe.step(*batch).loss)
    ended.set()
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    if save is not None:
        save.wait()
    pipe.close()
    return Outcome(tuple(map(float, losses)), state)
