"""Families: the proposals of one kind, of which the local search makes the best plan of that kind.

A family has one schedule, with or without replicas, which split microbatches or not, with or without recomputation, one
microbatch size and one number of stages per rank.

Which layers and ranks go together depends little on the schedule. So the stages that are proposed for one schedule are
tried under all others, too, and in the end those of the fastest families in the other families. Structures that cannot
be as fast as the best plan of any family are not searched (`lower_bounds`). In all else the search in a family does not
depend on the others. So a wish that excludes families takes stages away from the remaining ones, and adds only
structures that are slower than the best plan without the wish.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.errors import PlanError, ScheduleError
from penstock.planning.memory import peak_bytes
from penstock.planning.planner_names import PlannerName
from penstock.planning.predictions import predict, slowest_seconds
from penstock.planning.search.constraints import plans_for
from penstock.planning.stage_costs import AllReduce, ChainCosts
from penstock.scheduling.definitions import PipelineShape, ScheduleDefinition
from penstock.scheduling.orders import METHODS
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile


@dataclass(frozen=True, slots=True)
class Family:
    """What the plans of a family have in common."""

    schedule: ScheduleDefinition | str
    straight: bool
    splits: bool
    """Whether replicas split every microbatch."""
    recompute: bool
    microbatch_size: int | None
    stages_per_rank: int


def family_of(plan: Plan) -> Family:
    """The family of `plan`."""
    straight = max(plan.replicas) == 1
    splits = not straight and plan.routing == "split"
    return Family(
        plan.schedule,
        straight,
        splits=splits,
        recompute=plan.recompute,
        microbatch_size=plan.microbatch_size,
        stages_per_rank=plan.stages_per_rank,
    )


def share_stages(
    plans: Iterable[Plan],
    microbatches: Mapping[ScheduleDefinition | str, int],
    profile: Profile,
    *,
    costs: Mapping[bool, ChainCosts],
    cluster: Cluster,
    allreduce: AllReduce,
) -> list[Plan]:
    """The stages of `plans` under every schedule in `microbatches`, with its number of microbatches.

    Each has a prediction by closed form; `costs` has those without and with recomputation. Plans with several stages
    per rank are left out, and so are those that a schedule cannot run or that do not fit.
    """
    shared: list[Plan] = []
    kinds = {(plan.stages, plan.recompute): plan for plan in plans if plan.stages_per_rank == 1}
    slowest: dict[tuple[object, bool], float] = {}
    for stages, recompute in kinds:
        slowest[stages, recompute] = slowest_seconds(stages, costs[recompute], cluster, allreduce)
    for definition in METHODS:
        name = definition.name
        if name not in microbatches or definition.layout.has_several:
            continue
        for (stages, recompute), plan in kinds.items():
            if recompute and definition.splits_backward:
                continue
            made = _arrange(plan, definition, microbatches[name], profile)
            if made is None:
                continue
            predicted = predict(made, profile, costs[recompute], slowest[stages, recompute])
            limit = cluster.memory_bytes
            if limit is None or max(peak_bytes(made, costs[recompute])) <= limit:
                shared.append(replace(made, predicted=predicted, planner=plan.planner))
    return shared


def _arrange(plan: Plan, definition: ScheduleDefinition, microbatches: int, profile: Profile) -> Plan | None:
    """The stages of `plan` under `definition`; None if it cannot run them."""
    # The planner spp divides microbatches among replicas.
    split = plans_for(PlannerName.SPP, definition)
    if split and any(profile.microbatch_size % count for count in plan.replicas):
        return None
    try:
        made = Plan(
            plan.stages,
            definition.name,
            microbatches,
            profile.microbatch_size,
            recompute=plan.recompute,
            routing="split" if split else "round-robin",
        )
        definition.check(PipelineShape(made.placement, microbatches))
    except (PlanError, ScheduleError):
        return None
    return made


def fastest(plans: Sequence[Plan], count: int) -> list[Plan]:
    """The first `count` of `plans` by their predictions."""
    return sorted(plans, key=lambda plan: -plan.predicted.samples_per_second if plan.predicted else 0.0)[:count]
