"""Builds the stages of each rank from a plan and a captured model, before the first step.

The plan is checked here, once, so that a wrong plan or an unsupported combination ends with an error instead of a
hang.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from torch import nn

from penstock.arguments import is_count
from penstock.capturing.chain import LayerChain, StageModule, require_cuts
from penstock.capturing.crossings import crossings_of
from penstock.errors import PlanError
from penstock.runtime.assembly.parallelize_hooks import InPlace, sharded_modules
from penstock.runtime.assembly.restrictions import check_split_backwards, check_wire_dtype
from penstock.runtime.devices.device_context import DeviceContext
from penstock.runtime.devices.timestamps import Timestamp
from penstock.runtime.engine.local_stage import LocalStage
from penstock.runtime.execution.recomputation import Granularity, Recompute, choose_granularities
from penstock.runtime.parameters.fsdp_gradients import ShardedReducer
from penstock.runtime.parameters.gradient_buckets import Reducer
from penstock.runtime.parameters.shards import dimensions_of
from penstock.runtime.parameters.weight_versions import ComputeWeights, Sharers, VersionedWeights
from penstock.runtime.transport.transport import Transport
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.lowering import partners
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.scheduling.schedule_names import identify, names_of
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.skips import SkipChoice, choose_skips
from penstock.scheduling.verification.verifier import verify
from penstock.training.recipes import Recipe, check_scaled_rates
from penstock.values.crossings import find_hops, find_stops, find_way
from penstock.values.layer_weights import LayerWeights
from penstock.values.plan_stages import members_of
from penstock.values.plans import Plan, require_schedule
from penstock.values.plans import schedule as schedule_of


def choose_plan(
    plan: Plan | None,
    *,
    weights: LayerWeights,
    processes: int,
    schedule: ScheduleDefinition | str | None,
    stages: int | None,
    microbatches: int | None,
    vertical_sync: bool,
    tensor_parallel: int | None = None,
) -> Plan:
    """The plan to run: `plan` if there is one, else the layers, which weigh `weights`, balanced over `stages` stages
    (default: one for every `tensor_parallel` of the `processes`).

    `stages` counts all stages. Where a rank can hold several, it holds ``stages / ranks`` of them, two by default, and
    always two in a V. Raises `PlanError` if the arguments contradict each other.
    """
    if plan is None:
        tensor_parallel_size = 1 if tensor_parallel is None else tensor_parallel
        ranks = max(1, processes // tensor_parallel_size) if is_count(tensor_parallel_size, least=1) else 1
        definition = require_schedule(DEFAULT_SCHEDULE if schedule is None else schedule)
        per_rank = definition.layout.default_stages_per_rank(stages, ranks)
        total = stages if stages is not None else ranks * per_rank
        require_cuts(len(weights.layers), total)
        balanced = Plan.balanced(
            weights.layers,
            total,
            definition,
            microbatches=1 if microbatches is None else microbatches,
            stages_per_rank=per_rank,
            vertical_sync=vertical_sync,
            speeds=_group_speeds(weights.speeds, ranks, tensor_parallel_size),
        )
        made = _with_tensor_parallel(balanced, tensor_parallel_size)
        if stages is not None and 1 < processes != made.ranks:
            raise PlanError(
                f"stages={stages} needs {made.ranks} processes, {processes} were started: "
                "start as many, or leave stages= out for as many stages as there are processes"
            )
        return made
    given = {
        "schedule": None if schedule is None else identify(require_schedule(schedule)),
        "microbatches": microbatches,
        "stages": stages,
        "vertical_sync": vertical_sync or None,
        "tensor_parallel": tensor_parallel,
    }
    planned = {
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "stages": len(plan.stages),
        "vertical_sync": plan.vertical_sync,
        "tensor_parallel": plan.tensor_parallel,
    }
    for name, value in given.items():
        if value is not None and value != planned[name]:
            raise PlanError(
                f"{name}={value!r} contradicts the plan, which has {name} {planned[name]!r}: leave {name}= out, or "
                "change the plan"
            )
    return plan


def _group_speeds(speeds: Sequence[float], ranks: int, width: int) -> tuple[float, ...]:
    """The speed of every group of `width` tensor-parallel processes, which is that of its slowest; none if unknown."""
    if len(speeds) != ranks * width:
        return ()
    return tuple(min(speeds[first : first + width]) for first in range(0, len(speeds), width))


def _with_tensor_parallel(plan: Plan, tensor_parallel_size: int) -> Plan:
    """`plan` with `tensor_parallel_size` processes for each of its ranks."""
    if tensor_parallel_size == 1:
        return plan
    return replace(
        plan,
        stages=tuple(
            replace(stage, ranks=members_of(stage.ranks, tensor_parallel_size))
            for stage in (plan.stages if is_count(tensor_parallel_size, least=1) else ())
        ),
        tensor_parallel=tensor_parallel_size,
    )


def check_plan(plan: Plan, chain: LayerChain) -> None:
    """Raises `PlanError` if `plan` does not fit the model."""
    if plan.layers != len(chain.layers):
        require_cuts(len(chain.layers), len(plan.stages))
        names = ", ".join(layer.name for layer in chain.layers)
        raise PlanError(
            f"the plan is for {plan.layers} layers and the model has {len(chain.layers)}: {names}. Plan with a profile "
            "of this model"
        )


def check_schedule(
    chosen: Plan, chain: LayerChain, *, recompute: Recompute, recipe: Recipe, skips: SkipChoice, compiled: bool
) -> tuple[Plan, Mapping[int, Granularity], Schedule]:
    """`chosen` with its stages that recompute, how they do, and the schedule.

    Raises `PlanError` or `ScheduleError` if the plan does not fit the model, or the schedule breaks a rule or cannot be
    combined with the options.
    """
    plan, granularities = choose_granularities(chosen, recompute)
    check_plan(plan, chain)
    schedule = make_schedule(plan, chain, recipe.needs_norms, skips)
    verify(schedule)
    check_split_backwards(schedule, compiled, granularities)
    check_wire_dtype(recipe, plan, chain)
    return plan, granularities, schedule


def make_schedule(plan: Plan, chain: LayerChain, norms: bool = False, skips: SkipChoice = "auto") -> Schedule:
    """The schedule of `plan`, with the stages of this model that share weights. `norms`: whether stages exchange the
    norms of their gradients. `skips`: which values go directly past stages that do not read them.

    `PlanError` if stages share weights that update at different times or have different numbers of replicas;
    `ScheduleError` if the plan's numbers do not fit the schedule.
    """
    schedule = schedule_of(plan)
    shared = _tied(plan, chain)
    if shared and not plan.definition.synchronizes_updates:
        names = ", ".join(f"{name} (stages {', '.join(map(str, stages))})" for name, stages in shared.items())
        raise PlanError(
            f"weights are shared across stages: {names}. Under {str(plan.schedule)!r} every stage updates at its own "
            "time, so the copies would drift apart. Use a flushing schedule "
            f"({names_of(lambda each: each.flushes)}) or {names_of(lambda each: each.defers_updates)}, untie the "
            "weights, or plan the layers that share them into one stage"
        )
    for name, stages in shared.items():
        if not schedule.placement.equal(stages):
            counts = ", ".join(f"stage {stage}: {schedule.placement.replicas(stage)}" for stage in stages)
            raise PlanError(
                f"{name} is shared by stages with different numbers of replicas ({counts}): expected equal numbers, "
                "since replica q of one exchanges its gradients with replica q of the other. Give them equally many "
                "ranks, or plan the layers that share the weight into one stage"
            )
    schedule = replace(schedule, ties=tuple(sorted(set(shared.values()))), norms=norms)
    return choose_skips(schedule, find_hops(crossings_of(chain), _starts(plan)), skips)


def _reroute(module: StageModule, index: int, schedule: Schedule, plan: Plan, chain: LayerChain) -> None:
    """Changes which values the module of stage `index` receives and sends, by the skips of `schedule`."""
    if not schedule.skips:
        return
    sources: dict[str, int] = {}
    targets = dict.fromkeys(module.sent, 1) if index == schedule.stages - 1 else {}
    for crossing in crossings_of(chain):
        way = find_way(find_stops(crossing, _starts(plan)), schedule.skips)
        if index in way:
            position = way.index(index)
            if position > 0:
                sources[crossing.name] = index - way[position - 1]
            if position + 1 < len(way):
                targets[crossing.name] = way[position + 1] - index
    module.reroute(sources, targets)


def _starts(plan: Plan) -> Sequence[int]:
    return [stage.start for stage in plan.stages]


def _tied(plan: Plan, chain: LayerChain) -> dict[str, tuple[int, ...]]:
    """The parameters that several stages use, by name, with these stages."""
    result: dict[str, tuple[int, ...]] = {}
    for name, parameter in _distinct(chain.parameters).items():
        layers = chain.readers[name]
        stages = tuple(
            index for index, s in enumerate(plan.stages) if any(s.start <= layer < s.stop for layer in layers)
        )
        if len(stages) > 1 and parameter.requires_grad:
            result[name] = stages
    return result


def counted_parameters(plan: Plan, chain: LayerChain) -> dict[int, dict[str, nn.Parameter]]:
    """By stage, the trained parameters that no earlier stage uses: its share of a norm over all stages."""
    counted: dict[int, dict[str, nn.Parameter]] = {index: {} for index in range(len(plan.stages))}
    for name, parameter in _distinct(chain.parameters).items():
        first = min(chain.readers[name], default=None)
        if first is not None and parameter.requires_grad:
            (index,) = (index for index, stage in enumerate(plan.stages) if stage.start <= first < stage.stop)
            counted[index][name] = parameter
    return counted


def _stage_parameters(chain: LayerChain, module: StageModule) -> dict[str, nn.Parameter]:
    """The parameters that `module` uses, each once, under its first name in the model."""
    used = {id(parameter) for parameter in module.parameters()}
    return {name: p for name, p in _distinct(chain.parameters).items() if id(p) in used}


def build_stages(
    plan: Plan,
    chain: LayerChain,
    schedule: Schedule,
    *,
    ranks: Sequence[int],
    transport: Transport,
    granularities: Mapping[int, Granularity],
    modules: Mapping[int, StageModule],
    compute_weights: Sequence[ComputeWeights],
    context: DeviceContext,
) -> dict[int, dict[int, LocalStage]]:
    """The stages of this process by its `ranks`, both ascending. `granularities`: how they recompute. `modules`: those
    that a hook has changed. `compute_weights`: by stage, the weights that its forwards read.

    The first of the replicas of a stage that live in this process holds the model's own parameters and buffers.
    """
    shared = _tied(plan, chain)
    firsts: dict[int, LocalStage] = {}
    shared_weights: dict[str, VersionedWeights] = {}
    tied = Sharers()
    for index in sorted({stage for rank in ranks for stage in schedule.stages_of(rank)}):
        start, stop = plan.stages[index].start, plan.stages[index].stop
        module = modules[index] if index in modules else chain.stage(start, stop)
        _reroute(module, index, schedule, plan, chain)
        module.differentiable = chain.differentiable
        parameters = _stage_parameters(chain, module)
        weights = VersionedWeights(
            module,
            parameters,
            schedule.versions(index),
            lent={name: shared_weights[name] for name in parameters if name in shared_weights},
            sharers=tied if any(name in shared for name in parameters) else None,
            compute_weights=compute_weights[index],
            swapped=bool(sharded_modules(module)),
        )
        # The first of the stages in a process that share a weight updates it.
        for name in parameters:
            if name in shared:
                shared_weights.setdefault(name, weights)
        firsts[index] = LocalStage(
            weights,
            evaluation=partial(InPlace, weights)
            if index in modules
            else cache(partial(_evaluation, chain, start, stop)),
            ties={
                partner: tuple(name for name, sharing in shared.items() if index in sharing and partner in sharing)
                for partner in partners(index, schedule.ties)
            },
        )
    stages: dict[int, dict[int, LocalStage]] = {rank: {} for rank in ranks}
    for rank, own in stages.items():
        for index in schedule.stages_of(rank):
            first, group = firsts[index], schedule.placement.stages[index]
            owner = next(member for member in group if member in stages)
            weights = first.weights if rank == owner else first.weights.replica()
            late = {name for names in first.ties.values() for name in names}
            reducer = None
            if len(group) > 1:
                reducer = _reducer(
                    weights,
                    transport,
                    group=group,
                    rank=rank,
                    stage=index,
                    late=late,
                    now=context.timer.now,
                )
            others = {other for stage in (index, *first.ties) for other in schedule.placement.stages[stage]}
            own[index] = LocalStage(
                weights,
                evaluation=first.evaluation,
                ties=first.ties,
                reducer=reducer,
                recomputes=granularities.get(index),
                order=context.streams.order(rank, sorted(others.intersection(ranks) - {rank})),
            )
    return stages


def _reducer(
    weights: VersionedWeights,
    transport: Transport,
    *,
    group: tuple[int, ...],
    rank: int,
    stage: int,
    late: Collection[str],
    now: Callable[[], Timestamp],
) -> Reducer:
    trained = {name: p for name, p in weights.parameters.items() if p.requires_grad}
    if modules := sharded_modules(weights.stage):
        whole = {name: p for name, p in trained.items() if "dp" not in dimensions_of(p)}
        return ShardedReducer(
            transport, group=group, rank=rank, stage=stage, parameters=whole, modules=modules, now=now
        )
    return Reducer(transport, group=group, rank=rank, stage=stage, parameters=trained, late=late, now=now)


def _evaluation(chain: LayerChain, start: int, stop: int) -> StageModule:
    return chain.evaluation().stage(start, stop)


def learning_rate_factors(schedule: Schedule, local: Iterable[int], scaled: bool) -> dict[int, float]:
    """By stage of the ranks `local`, r / r0 if rates are `scaled` with the microbatches of an update, else 1.

    Raises `PlanError` if they are to be scaled under a schedule whose stages all update at once.
    """
    check_scaled_rates(scaled, schedule.definition.updates_per_microbatch, schedule.name)
    sizes = schedule.guarantees.microbatches_per_update
    stages = sorted({stage for rank in local for stage in schedule.stages_of(rank)})
    return {stage: sizes[stage] / sizes[0] if scaled else 1.0 for stage in stages}


def _distinct(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Each parameter once, under its first name."""
    seen: dict[int, str] = {}
    for name, parameter in parameters.items():
        seen.setdefault(id(parameter), name)
    return {name: parameters[name] for name in seen.values()}
