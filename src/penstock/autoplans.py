"""``plan="auto"``: measures the model and the links, plans, and gives every rank the same plan.

Rank 0 measures the model and plans, and sends the plan to all: two profiles never agree exactly. The plan uses all
ranks, with replicas of a stage where that is faster. If no schedule is given, the plan has one that flushes, since a
planner must not change which gradients a step applies. For the same reason replicas do not split microbatches of a
model with BatchNorm, whose statistics would be those of a share of the microbatch.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from penstock.capturing.chain import LayerChain
from penstock.capturing.export.guards import takes_statistics
from penstock.errors import PlanError, ScheduleError
from penstock.planning.planners import plan as plan_on
from penstock.profiling.links import measure_links
from penstock.profiling.profiler import profile as measure
from penstock.runtime.assembly.stages import make_schedule, stages_per_rank
from penstock.runtime.transport.collective_errors import gather_results
from penstock.runtime.transport.worlds import World
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile

__all__ = ["AutoPlan", "Choices", "fastest_plan", "plan_automatically"]


@dataclass(frozen=True, slots=True)
class Choices:
    """The arguments that the user has fixed; None leaves one to the planner."""

    schedule: str | None = None
    microbatches: int | None = None
    stages: int | None = None
    vertical_sync: bool = False
    whole_backwards: bool = False
    """Whether the stages cannot split a backward."""
    autocast: torch.dtype | None = None
    """The type that the model will compute in under autocast."""


@dataclass(frozen=True, slots=True)
class AutoPlan:
    """A plan, with the measurements that it was made from."""

    plan: Plan
    profile: Profile
    cluster: Cluster


def plan_automatically(
    plan: str,
    choices: Choices,
    *,
    world: World,
    chain: LayerChain,
    sample: tuple[Any, ...] | dict[str, Any],
    device: torch.device,
) -> AutoPlan:
    """The fastest plan for the processes of `world`, the same on all. Collective.

    A single process has as many ranks as `choices` gives it stages (half as many with `interleaved`), and instant links
    between them. An error on one rank is raised on all.
    """
    if plan != "auto":
        raise PlanError(
            f"plan={plan!r}: expected a penstock.Plan or 'auto'. Load a file with penstock.Plan.load({plan!r})"
        )
    if world.processes > 1:
        cluster = measure_links(world, device)
    else:
        per_rank = stages_per_rank(choices.schedule, choices.stages, 1)
        cluster = Cluster.uniform(max(1, (choices.stages or 1) // per_rank), math.inf)

    def work() -> AutoPlan | None:
        if world.rank != 0:
            return None
        profile = measure(chain, sample, autocast=choices.autocast)
        return AutoPlan(fastest_plan(profile, cluster, chain, choices), profile, cluster)

    made = gather_results(world, "while it measured the model and planned", work)[0]
    assert made is not None
    return made


def fastest_plan(profile: Profile, cluster: Cluster, chain: LayerChain, choices: Choices) -> Plan:
    """The fastest plan by `penstock.plan` that runs on all devices of `cluster`.

    If there is none, raises the error of the simplest plan.
    """
    flushes = choices.schedule is None and not choices.vertical_sync
    search = partial(
        plan_on,
        profile,
        cluster,
        microbatches=choices.microbatches,
        synchronous=flushes,
        vertical_sync=choices.vertical_sync,
        whole_backwards=choices.whole_backwards and choices.schedule is None,
    )
    per_rank = stages_per_rank(choices.schedule, choices.stages, cluster.devices)
    whole = any(takes_statistics(layer.module) for layer in chain.layers)
    # All planners, and if the best plan splits microbatches that must stay whole, the one that never does.
    for planner in (None, "pipedream") if choices.stages is None else ():
        with suppress(PlanError, ScheduleError):
            made = search(schedule=choices.schedule, planner=planner)
            make_schedule(made, chain)
            # The search may leave devices idle, and under `torchrun` every process is a rank.
            if made.ranks == cluster.devices and not (whole and made.routing == "split"):
                return made
    made = search(
        schedule="1f1b-flush" if flushes else choices.schedule,
        stages=choices.stages or cluster.devices * per_rank,
        stages_per_rank=per_rank,
    )
    make_schedule(made, chain)
    return made
