"""``plan="auto"``: measure the model and the links, plan, and give every rank the same plan.

Rank 0 measures the model and plans; two profiles never agree exactly, so that one plan is made and sent to all. Until
the runtime does more, the plan has one rank per stage, all ranks, no recomputation. Where the schedule is not given it
is one that flushes, since which gradients a step applies is not for a planner to change.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from penstock.capturing.chain import LayerChain
from penstock.errors import PlanError, ScheduleError
from penstock.planning.planners import plan as plan_on
from penstock.profiling.links import measure_links
from penstock.profiling.profiler import profile as measure
from penstock.runtime.agreements import gather_results
from penstock.runtime.setup import make_schedule, stages_per_rank
from penstock.runtime.worlds import World
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile

__all__ = ["AutoPlan", "Wishes", "plan_automatically"]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user has fixed; None leaves it to the planner."""

    schedule: str | None = None
    microbatches: int | None = None
    stages: int | None = None
    vertical_sync: bool = False


@dataclass(frozen=True, slots=True)
class AutoPlan:
    """A plan and what it was made from."""

    plan: Plan
    profile: Profile
    cluster: Cluster


def plan_automatically(
    world: World,
    chain: LayerChain,
    sample: tuple[Any, ...] | dict[str, Any],
    device: torch.device,
    plan: str,
    wishes: Wishes,
) -> AutoPlan:
    """The fastest plan for the processes of `world`, the same on all. Collective.

    A single process has as many ranks as `wishes` gives it stages (half as many with `interleaved`), and instant links
    between them. An error on one rank is raised on all.
    """
    if plan != "auto":
        raise PlanError(
            f"plan={plan!r}: expected a penstock.Plan or 'auto'. Load a file with penstock.Plan.load({plan!r})"
        )
    if world.processes > 1:
        cluster = measure_links(world, device)
    else:
        per_rank = stages_per_rank(wishes.schedule, wishes.stages, 1)
        cluster = Cluster.uniform(max(1, (wishes.stages or 1) // per_rank), math.inf)

    def work() -> AutoPlan | None:
        if world.rank != 0:
            return None
        profile = measure(chain, sample)
        return AutoPlan(fastest_plan(profile, cluster, chain, wishes), profile, cluster)

    made = gather_results(world, "while it measured the model and planned", work)[0]
    assert made is not None
    return made


def fastest_plan(profile: Profile, cluster: Cluster, chain: LayerChain, wishes: Wishes) -> Plan:
    """The plan of the most samples per second among those that run on all devices of `cluster`, one rank per stage.

    `PlanError` or `ScheduleError` of the simplest one if there is none.
    """
    plans: list[Plan] = []
    failures: list[PlanError | ScheduleError] = []
    for schedule, per_rank in _schedules(cluster.devices, wishes):
        try:
            made = plan_on(
                profile,
                cluster,
                schedule=schedule,
                microbatches=wishes.microbatches,
                stages=wishes.stages or cluster.devices * per_rank,
                stages_per_rank=per_rank,
                straight=True,
                vertical_sync=wishes.vertical_sync,
            )
            make_schedule(made, chain)
            plans.append(made)
        except (PlanError, ScheduleError) as error:
            failures.append(error)
    if not plans:
        raise failures[0]
    return max(plans, key=_samples_per_second)


def _schedules(ranks: int, wishes: Wishes) -> Iterator[tuple[str, int]]:
    """Names of schedules to try, with the stages of each on a rank; the simplest one first."""
    if wishes.schedule is not None:
        yield wishes.schedule, stages_per_rank(wishes.schedule, wishes.stages, ranks)
        return
    yield "1f1b" if wishes.vertical_sync else "1f1b-flush", 1
    if wishes.stages is None and ranks > 1 and not wishes.vertical_sync:
        yield "interleaved", 2


def _samples_per_second(plan: Plan) -> float:
    return plan.predicted.samples_per_second if plan.predicted is not None else 0.0
