"""Plans whose weights are on the host: for models of which no plan fits into the devices, or by wish.

Every stage recomputes, and a rank visits each of its stages once each way, or once for each of several groups of
microbatches, which keep fewer of them in flight. The first stages of every rank stay on it as far as there is room: a
step begins with them, when no fetch is hidden. The simulator judges all of them.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from penstock.errors import PlanError, ScheduleError
from penstock.planning.predictions import prediction_of, speed_of
from penstock.planning.search.constraints import PlanConstraints
from penstock.planning.search.plan_search import SearchResult, judge_plan, rank_plans
from penstock.scheduling.actions import Update
from penstock.scheduling.definitions import PipelineShape, ScheduleDefinition, Step
from penstock.scheduling.orders import METHODS
from penstock.scheduling.placements import Placement
from penstock.scheduling.verification.verifier import verify
from penstock.scheduling.written_programs import define_by_programs
from penstock.simulating.outcomes import evaluate
from penstock.values.chain_cuts import balanced_cuts
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Stage, schedule
from penstock.values.profiles import Profile
from penstock.values.quantities import seconds_text

_ONCE = next(method for method in METHODS if method.for_streams)


def stream_plans(profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints) -> SearchResult:
    """The plans with streamed stages that fit, the fastest first."""
    found: list[Plan] = []
    for profile, plans in _cut_all(profiles, cluster, constraints):
        best = 0.0
        for plan in plans:
            made = list(_fullest(plan, profile, cluster, constraints))
            found += made
            fastest = max(map(speed_of, made), default=0.0)
            if fastest < best:
                # More stages keep more inputs of microbatches, and hide the first fetches no better.
                break
            best = fastest
    ranked = rank_plans(found)
    for plan in ranked[:1]:
        verify(schedule(plan))
    return SearchResult(ranked, 0, ())


def smallest_streamed(profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints) -> Plan | None:
    """The plan with streamed stages that needs the least memory, if one fits and `cluster` has a `host_bandwidth`."""
    made = (
        _judge(replace(plan, schedule=definition), 0, profile, cluster, constraints)
        for profile, plans in _cut_all(profiles, cluster, constraints)
        for plan in plans
        for definition in _definitions(plan)
    )
    return min(filter(None, made), key=lambda plan: max(prediction_of(plan).peak_bytes), default=None)


def explain_streams(best: Plan, profile: Profile, cluster: Cluster, constraints: PlanConstraints) -> str:
    """What it costs that the stages of `best` are streamed, in a line."""
    predicted = prediction_of(best)
    seconds, bound = predicted.minibatch_seconds, predicted.bottleneck_seconds * best.microbatches
    free = evaluate(replace(best, streamed=False), profile, cluster, **constraints.simulator_options)
    return (
        f"Weights are on the host: those of {len(best.streaming)} of {len(best.stages)} stages come when they are "
        f"needed, and updates move the state. A step takes {seconds_text(seconds)}, "
        f"{seconds / free.minibatch_seconds - 1:.0%} more than with everything on devices that had the room, and "
        f"{seconds / bound - 1:.0%} more than its busiest rank or link works. Limited by: {predicted.limit}."
    )


def _cut_all(
    profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints
) -> Iterator[tuple[Profile, Iterator[Plan]]]:
    """Each profile and length of equal pipelines on all devices, with its plans, from few stages to many; nothing if
    what is fixed excludes streamed stages, or the bytes per second to the host are not known.
    """
    fixed = constraints.planner is not None or constraints.vertical_sync or constraints.recompute is False
    own = constraints.schedule not in (None, _ONCE.name)
    if fixed or own or constraints.streamed is False or cluster.host_bandwidth is None:
        return
    lengths = [ranks for ranks in range(cluster.devices, 0, -1) if cluster.devices % ranks == 0]
    for profile in profiles:
        microbatches = constraints.count_microbatches(profile, profiles[0], cluster.devices, _ONCE)
        if profile.tensor_parallel == 1 and microbatches:
            for ranks in lengths[:1] if constraints.straight else lengths:
                counts = _stage_counts(len(profile), ranks, constraints)
                plans = (_cut(profile, cluster, ranks, per_rank, microbatches) for per_rank in counts)
                yield profile, (replace(plan, streamed=_untied(plan, constraints.tied_layers)) for plan in plans)


def _stage_counts(layers: int, ranks: int, constraints: PlanConstraints) -> Iterator[int]:
    """The stages of a rank to try: those that are wished, else powers of two, and as many as there are."""
    most, wished = layers // ranks, constraints.stages_per_rank
    tried = {*(1 << power for power in range(most.bit_length())), most} - {0}
    if constraints.stages is not None:
        tried = {constraints.stages // ranks} if constraints.stages % ranks == 0 else set()
    elif wished is not None:
        tried = {wished}
    for per_rank in sorted(tried):
        if per_rank <= most and wished in (None, per_rank):
            yield per_rank


def _untied(plan: Plan, tied: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The stages of `plan` that share no weights of `tied` layers with another one."""
    starts = [stage.start for stage in plan.stages]
    holding = [{bisect_right(starts, layer) - 1 for layer in layers} for layers in tied]
    shared = {stage for stages in holding if len(stages) > 1 for stage in stages}
    return tuple(stage for stage in range(len(starts)) if stage not in shared)


def _cut(profile: Profile, cluster: Cluster, ranks: int, per_rank: int, microbatches: int) -> Plan:
    """The plan of `ranks` times `per_rank` stages whose longest forward visit, or fetch, is as short as possible."""
    bandwidth = cluster.host_bandwidth or 1.0
    longest = [
        max(layer.forward_seconds * microbatches, (layer.parameter_bytes + layer.frozen_bytes) / bandwidth)
        for layer in profile.layers
    ]
    cuts, replicas = balanced_cuts(longest, ranks * per_rank, ()), cluster.devices // ranks
    stages = tuple(
        Stage(start, stop, tuple(range(index % ranks * replicas, (index % ranks + 1) * replicas)))
        for index, (start, stop) in enumerate(pairwise(cuts))
    )
    return Plan(*(stages, _ONCE, microbatches, profile.microbatch_size), recompute=True, planner="streamed")


def _fullest(plan: Plan, profile: Profile, cluster: Cluster, constraints: PlanConstraints) -> Iterator[Plan]:
    """`plan` with all stages streamed, in as few groups of microbatches as fit, and with the most that stay."""
    for definition in _definitions(plan):
        low, high = -1, plan.stages_per_rank
        while high - low > 1:
            middle = (low + high) // 2 if low >= 0 else 0
            made = _judge(replace(plan, schedule=definition), middle, profile, cluster, constraints)
            low, high = (low, middle) if made is None else (middle, high)
            if made is not None:
                yield made
        if low >= 0:
            return


def _judge(plan: Plan, staying: int, profile: Profile, cluster: Cluster, constraints: PlanConstraints) -> Plan | None:
    """`plan` of whose streamed stages the first `staying` of every rank stay, if it fits."""
    first = staying * (len(plan.stages) // plan.stages_per_rank)
    with suppress(PlanError, ScheduleError):
        made = replace(plan, streamed=tuple(stage for stage in sorted(plan.streaming) if stage >= first))
        return judge_plan(made, profile, cluster, constraints)
    return None


def _definitions(plan: Plan) -> Iterator[ScheduleDefinition]:
    """The orders to try: all microbatches in one group, and without replicas also in 2, 4, 8, ... groups."""
    yield _ONCE
    group = plan.microbatches
    while max(plan.replicas) == 1 and group % 2 == 0:
        group //= 2
        yield _in_groups(plan, group)


def _in_groups(plan: Plan, group: int) -> ScheduleDefinition:
    """The order that takes the microbatches in groups of `group`, each as a step of that many would."""
    ranks = len(plan.stages) // plan.stages_per_rank
    shape = PipelineShape(Placement.straight(ranks, plan.stages_per_rank), group)
    rows = []
    for rank in range(ranks):
        entries = list(_ONCE.order(shape, rank, Step(0)))
        updates = [entry for entry in entries if isinstance(entry, Update)]
        visits = [entry for entry in entries if not isinstance(entry, Update)]
        rows.append(" | ".join(" ".join(map(str, part)) for part in ((), visits, updates)))
    return define_by_programs(f"{_ONCE} in groups of {group}", "\n".join(rows))
