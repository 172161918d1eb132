"""Runs under schedules of the user's own, in the processes of the pool."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import penstock
from penstock.scheduling import ScheduleDefinition
from support.own_schedules import EAGER, LATE, OWN, make_local
from support.training import LAYERS, Case, Outcome, find_subject, run_pipeline

__all__ = ["disagree", "plan_of", "run_own", "run_planned", "run_saved"]


def plan_of(schedule: ScheduleDefinition | str, ranks: int) -> penstock.Plan:
    """The layers of a subject on `ranks` ranks, four microbatches."""
    return penstock.Plan.uniform(LAYERS, ranks, schedule, 4)


def run_own(subject: str, name: str, ranks: int) -> Outcome:
    """Training under the schedule `name`, whose definition cannot be pickled."""
    return run_pipeline(Case(subject, "gpipe", ranks, 4, "adamw"), plan=plan_of(make_local(OWN[name]), ranks))


def run_planned(ranks: int) -> tuple[str, tuple[float, ...], dict[str, Any]]:
    """Training under a plan that the pipeline makes for a schedule: the schedule's name, the losses, and what the plan
    chose.
    """
    case = Case("layered", "gpipe", ranks, 4, "adamw")
    options = {**case.options, "schedule": make_local(EAGER), "microbatches": 4, "plan": "auto"}
    pipe = penstock.Pipeline(case.build(), **options)
    losses = tuple(float(pipe.step(x, y).loss) for x, y in case.batches)
    pipe.close()
    chosen = {name: getattr(pipe.plan, name) for name in ("stages", "routing", "recompute")}
    return str(pipe.plan.schedule), losses, chosen


def run_saved(ranks: int, directory: Path) -> list[float]:
    """Two steps under one schedule of one's own, and the others under another, from a checkpoint."""
    case = Case("layered", "gpipe", ranks, 4, "adamw")
    losses: list[float] = []
    for number, schedule in enumerate((EAGER, LATE)):
        pipe = penstock.Pipeline(case.build(), **{**case.options, "plan": plan_of(schedule, ranks)})
        if number:
            pipe.load(directory)
        handles = [pipe.step(x, y).loss for x, y in (case.batches[2:] if number else case.batches[:2])]
        pipe.save(directory)
        losses += map(float, handles)
        pipe.close()
    return losses


def disagree(rank_that_differs: int) -> str:
    """The error of a pipeline whose definitions have one name and different orders."""
    import torch.distributed as dist

    definition = EAGER if dist.get_rank() != rank_that_differs else replace(LATE, name=EAGER.name)
    subject = find_subject("layered")
    try:
        run_pipeline(Case("layered", "gpipe", 2, 4), plan=plan_of(definition, 2))
    except penstock.PlanError as error:
        return str(error)
    return f"{subject} trained"
