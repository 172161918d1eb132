"""``plan="auto"``: measures the model and the links, plans, and gives every rank the same plan.

All processes measure the model at the same time, since those of one host share its caches, memory and clock, and will
train at the same time, too. The seconds are scaled to what layers take together. Rank 0 plans by its own measurement,
and sends the plan to all: two profiles never agree exactly.

The plan uses all ranks, with replicas of a stage where that is faster. If no schedule is given, the plan has one that
flushes, since a planner must not change which gradients a step applies. For the same reason replicas do not split
microbatches of a model with BatchNorm, whose statistics would be those of a share of the microbatch.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch

from penstock.capturing.chain import LayerChain
from penstock.capturing.export.guards import takes_statistics
from penstock.errors import PlanError, ScheduleError
from penstock.planning.planner_names import PlannerName
from penstock.planning.planners import plan as plan_on
from penstock.profiling.links import measure_links
from penstock.profiling.profiler import profile as measure
from penstock.profiling.training_loops import as_in_training
from penstock.runtime.assembly.stages import make_schedule
from penstock.runtime.transport.collective_errors import gather_results
from penstock.runtime.transport.worlds import World
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.training.wire_codecs import WireDtype
from penstock.values.clusters import Cluster
from penstock.values.crossings import Crossing
from penstock.values.plans import Plan, Prediction, require_schedule
from penstock.values.profiles import LayerProfile, Profile
from penstock.values.stages import Stage

__all__ = ["AutoPlan", "Choices", "fastest_plan", "plan_automatically"]


@dataclass(frozen=True, slots=True)
class Choices:
    """The arguments that the user has fixed; None leaves one to the planner."""

    schedule: ScheduleDefinition | str | None = None
    microbatches: int | None = None
    stages: int | None = None
    vertical_sync: bool = False
    whole_backwards: bool = False
    """Whether the stages cannot split a backward."""
    autocast: torch.dtype | None = None
    """The type that the model will compute in under autocast."""
    wire_dtype: WireDtype | None = None
    """How stages will send each other tensors."""

    @classmethod
    def of(cls, given: Mapping[str, Any], *, whole_backwards: bool) -> "Choices":
        """What the arguments of `Pipeline` that were `given` by name have fixed; others among them do not matter."""
        named = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        return cls(**named, whole_backwards=whole_backwards)

    def stages_per_rank(self, ranks: int) -> int:
        """The stages that each of `ranks` ranks is to hold."""
        return require_schedule(self.schedule or DEFAULT_SCHEDULE).layout.default_stages_per_rank(self.stages, ranks)


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

    A single process has as many ranks as `choices` gives it stages (half as many where a rank holds two), and instant
    links between them. An error on one rank is raised on all.
    """
    if plan != "auto":
        raise PlanError(
            f"plan=: expected a penstock.Plan or 'auto', found {plan!r}: load a file with penstock.Plan.load({plan!r})"
        )
    if world.processes > 1:
        cluster = measure_links(world, device)
    else:
        per_rank = choices.stages_per_rank(1)
        cluster = Cluster.uniform(max(1, (choices.stages or 1) // per_rank), math.inf)

    def work() -> tuple[dict[str, Any], dict[str, Any]] | None:
        profile = measure(chain, sample, autocast=choices.autocast, wire_dtype=choices.wire_dtype)
        profile = as_in_training(profile, chain, sample, choices.autocast)
        if world.rank != 0:
            return None
        made = fastest_plan(profile, cluster, chain, choices)
        values = {field.name: getattr(made, field.name) for field in fields(made)}
        # Every rank has the definition of a schedule of the user's own, which need not be one that can be pickled.
        named = made.schedule if isinstance(made.schedule, str) else None
        predicted = None if made.predicted is None else asdict(made.predicted)
        stages = tuple([(stage.start, stage.stop, stage.ranks) for stage in made.stages])
        return values | {"schedule": named, "predicted": predicted, "stages": stages}, asdict(profile)

    made = gather_results(world, "while it measured the model and planned", work)[0]
    assert made is not None
    values, measured = made
    values["schedule"] = values["schedule"] or choices.schedule
    values["stages"] = tuple(Stage(*stage) for stage in values["stages"])
    values["predicted"] = values["predicted"] and Prediction(**values["predicted"])
    measured["layers"] = tuple(LayerProfile(**layer) for layer in measured["layers"])
    measured["crossings"] = tuple(Crossing(**crossing) for crossing in measured["crossings"])
    return AutoPlan(Plan(**values), Profile(**measured), cluster)


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
    per_rank = choices.stages_per_rank(cluster.devices)
    whole = any(takes_statistics(layer.module) for layer in chain.layers)
    # All planners, and if the best plan splits microbatches that must stay whole, the one that never does.
    for planner in (None, PlannerName.PIPEDREAM.value) if choices.stages is None else ():
        with suppress(PlanError, ScheduleError):
            made = search(schedule=choices.schedule, planner=planner)
            make_schedule(made, chain)
            # The search may leave devices idle, and under `torchrun` every process is a rank.
            if made.ranks == cluster.devices and not (whole and made.routing == "split"):
                return made
    made = search(
        schedule=DEFAULT_SCHEDULE if flushes else choices.schedule,
        stages=choices.stages or cluster.devices * per_rank,
        stages_per_rank=per_rank,
    )
    make_schedule(made, chain)
    return made
