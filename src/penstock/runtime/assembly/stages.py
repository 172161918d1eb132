"""From a plan and a captured model to what each rank holds, before the first step.

All of it is checked here, once, so that a wrong plan, a model that differs between ranks or a combination that is not
supported ends with its reason instead of a hang.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import nn

from penstock.capturing.chain import LayerChain, StageModule
from penstock.errors import PlanError
from penstock.runtime.assembly.parallelize_hooks import InPlace, sharded_modules
from penstock.runtime.assembly.skips import reroute, with_skips
from penstock.runtime.devices.device_context import DeviceContext
from penstock.runtime.devices.graph_capture import GRAPH_CAPTURERS
from penstock.runtime.engine.local_stages import LocalStage
from penstock.runtime.execution.compilation import CompiledStage
from penstock.runtime.execution.cuda_graphs import CudaGraphStage
from penstock.runtime.execution.recomputation import Granularity
from penstock.runtime.parameters.fsdp_gradients import ShardedReducer
from penstock.runtime.parameters.gradient_buckets import Reducer
from penstock.runtime.parameters.shards import dimensions_of
from penstock.runtime.parameters.weight_versions import ComputeWeights, VersionedWeights
from penstock.runtime.transport.device_meshes import processes_of
from penstock.runtime.transport.transport import Transport
from penstock.runtime.transport.worlds import World
from penstock.scheduling.lowering import partners
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.schedules import schedule as schedule_of
from penstock.scheduling.skips import SkipChoice
from penstock.values.crossings import Skip
from penstock.values.documents import is_count
from penstock.values.plans import Plan

__all__ = [
    "build_stages",
    "check_agreement",
    "check_plan",
    "choose_plan",
    "counted_parameters",
    "learning_rate_factors",
    "make_schedule",
    "stages_per_rank",
]


def choose_plan(
    plan: Plan | None,
    layers: int,
    processes: int,
    schedule: str | None,
    stages: int | None,
    microbatches: int | None,
    vertical_sync: bool,
    tensor_parallel: int | None = None,
) -> Plan:
    """The plan to run: `plan` if there is one, else equal numbers of layers in `stages` stages (default: one for every
    `tensor_parallel` of the `processes`).

    With 'interleaved' `stages` counts all stages; a rank holds ``stages / ranks`` of them, two by default, and always
    two with 'zb-v'. Raises `PlanError` if the arguments contradict each other.
    """
    if plan is None:
        tensor_parallel_size = 1 if tensor_parallel is None else tensor_parallel
        ranks = max(1, processes // tensor_parallel_size) if is_count(tensor_parallel_size, least=1) else 1
        per_rank = stages_per_rank(schedule, stages, ranks)
        total = stages if stages is not None else ranks * per_rank
        uniform = Plan.uniform(
            layers,
            total,
            schedule=schedule or "1f1b-flush",
            microbatches=microbatches or 1,
            stages_per_rank=per_rank,
            vertical_sync=vertical_sync,
        )
        return _widened(uniform, tensor_parallel_size)
    given = {
        "schedule": schedule,
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


def _widened(plan: Plan, tensor_parallel_size: int) -> Plan:
    """`plan` with `tensor_parallel_size` processes in the place of each."""
    if tensor_parallel_size == 1:
        return plan
    return replace(
        plan,
        stages=tuple(
            replace(
                stage,
                ranks=tuple(process for rank in stage.ranks for process in processes_of(rank, tensor_parallel_size)),
            )
            for stage in (plan.stages if is_count(tensor_parallel_size, least=1) else ())
        ),
        tensor_parallel=tensor_parallel_size,
    )


def stages_per_rank(schedule: str | None, stages: int | None, processes: int) -> int:
    """``v`` where it is not said: 2 under `interleaved`, or what `stages` on so many `processes` makes of it; 2 under
    `zb-v`.
    """
    if schedule not in ("interleaved", "zb-v"):
        return 1
    if stages is None or processes == 1 or schedule == "zb-v":
        return 2
    return max(1, stages // processes)


def check_plan(plan: Plan, chain: LayerChain) -> None:
    """Raises `PlanError` if `plan` does not fit the model or asks for what the runtime does not do."""
    if plan.layers != len(chain.layers):
        names = ", ".join(layer.name for layer in chain.layers)
        raise PlanError(
            f"the plan is for {plan.layers} layers and the model has {len(chain.layers)}: {names}. Plan with a profile "
            "of this model"
        )


def make_schedule(plan: Plan, chain: LayerChain, norms: bool = False, skips: SkipChoice = "auto") -> Schedule:
    """The schedule of `plan`, which knows the stages of this model that share weights. `norms`: whether stages are to
    tell each other the norms of their gradients. `skips`: which values go directly past stages that do not read them.

    `PlanError` if they do under pipedream, or the stages that share have different numbers of replicas;
    `ScheduleError` if the plan's numbers do not fit it.
    """
    schedule = schedule_of(plan)
    shared = _tied(plan, chain)
    if shared and plan.schedule == "pipedream":
        names = ", ".join(f"{name} (stages {', '.join(map(str, stages))})" for name, stages in shared.items())
        raise PlanError(
            f"weights are shared across stages: {names}. Under 'pipedream' every stage updates at its own time, so the "
            "copies would drift apart. Use a flushing schedule (gpipe, 1f1b-flush, interleaved, spp, zb-h1, zb-v) or "
            "2bw, untie the weights, or plan the layers that share them into one stage"
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
    return with_skips(schedule, plan, chain, skips)


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
    """By stage, the trained parameters that it uses and no stage before it: its share of a norm over all."""
    counted: dict[int, dict[str, nn.Parameter]] = {index: {} for index in range(len(plan.stages))}
    for name, parameter in _distinct(chain.parameters).items():
        first = min(chain.readers[name], default=None)
        if first is not None and parameter.requires_grad:
            (index,) = (index for index, stage in enumerate(plan.stages) if stage.start <= first < stage.stop)
            counted[index][name] = parameter
    return counted


def _stage_parameters(chain: LayerChain, module: StageModule) -> dict[str, nn.Parameter]:
    """The parameters that `module` uses, each once, under the model's first name for it."""
    used = {id(parameter) for parameter in module.parameters()}
    return {name: p for name, p in _distinct(chain.parameters).items() if id(p) in used}


def build_stages(
    plan: Plan,
    chain: LayerChain,
    schedule: Schedule,
    local: Sequence[int],
    transport: Transport,
    grains: Mapping[int, Granularity],
    modules: Mapping[int, StageModule],
    readings: Sequence[ComputeWeights],
    context: DeviceContext,
) -> dict[int, dict[int, LocalStage]]:
    """What this process holds: for its ranks `local` their stages, both ascending. `grains`: how stages recompute.
    `modules`: those that a hook has changed. `readings`: by stage, what forwards read of its weights.
    `context`: of the ranks.

    The first of the replicas of a stage that live in this process holds the model's own parameters and buffers.
    """
    shared = _tied(plan, chain)
    firsts: dict[int, LocalStage] = {}
    lent: dict[str, VersionedWeights] = {}
    for index in sorted({stage for rank in local for stage in schedule.stages_of(rank)}):
        start, stop = plan.stages[index].start, plan.stages[index].stop
        module = modules[index] if index in modules else chain.stage(start, stop)
        reroute(module, index, schedule, plan, chain)
        parameters = _stage_parameters(chain, module)
        weights = VersionedWeights(
            module,
            parameters,
            schedule.versions(index),
            {name: lent[name] for name in parameters if name in lent},
            pointed=not sharded_modules(module),
            reading=readings[index],
        )
        # Of the stages of one process that share a weight, the first one updates it.
        for name in parameters:
            if name in shared:
                lent.setdefault(name, weights)
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
    stages: dict[int, dict[int, LocalStage]] = {rank: {} for rank in local}
    for rank, held in stages.items():
        for index in schedule.stages_of(rank):
            first, group = firsts[index], schedule.placement.stages[index]
            owner = next(member for member in group if member in stages)
            weights = first.weights if rank == owner else first.weights.replica()
            late = {name for names in first.ties.values() for name in names}
            reducer = _reducer(weights, transport, group, rank, index, late, context) if len(group) > 1 else None
            others = {other for stage in (index, *first.ties) for other in schedule.placement.stages[stage]}
            order = context.streams.order(rank, sorted(others.intersection(local) - {rank}))
            replays = _replays(weights, index, context)
            held[index] = LocalStage(weights, first.evaluation, first.ties, reducer, grains.get(index), order, replays)
    return stages


def _reducer(
    weights: VersionedWeights,
    transport: Transport,
    group: tuple[int, ...],
    rank: int,
    stage: int,
    late: Collection[str],
    context: DeviceContext,
) -> Reducer:
    trained = {name: p for name, p in weights.parameters.items() if p.requires_grad}
    if modules := sharded_modules(weights.stage):
        whole = {name: p for name, p in trained.items() if "dp" not in dimensions_of(p)}
        return ShardedReducer(transport, group, rank, stage, whole, modules, context.timer.now)
    return Reducer(transport, group, rank, stage, trained, late, now=context.timer.now)


def _replays(weights: VersionedWeights, stage: int, context: DeviceContext) -> CudaGraphStage | None:
    """None for a stage whose work is not recorded."""
    module = weights.module(0)
    if not isinstance(module, CompiledStage) or not module.graphed:
        return None
    return CudaGraphStage(module, GRAPH_CAPTURERS[context.device.type](context.device), stage, context.device)


def _evaluation(chain: LayerChain, start: int, stop: int) -> StageModule:
    return chain.evaluation().stage(start, stop)


def learning_rate_factors(schedule: Schedule, local: Iterable[int], scaled: bool) -> dict[int, float]:
    """For the stages of the ranks `local`: r / r0 if rates are `scaled` by how many microbatches an update is of."""
    sizes = schedule.guarantees.microbatches_per_update
    held = sorted({stage for rank in local for stage in schedule.stages_of(rank)})
    return {stage: sizes[stage] / sizes[0] if scaled else 1.0 for stage in held}


@dataclass(frozen=True, slots=True)
class _Fingerprint:
    """What must be the same on every rank."""

    plan: Plan
    layers: tuple[str, ...]
    parameters: Mapping[str, str]
    skips: tuple[Skip, ...]


def check_agreement(world: World, plan: Plan, chain: LayerChain, schedule: Schedule | None = None) -> None:
    """Raises `PlanError` on every rank if the ranks have different plans or models, or skips in their `schedule`.
    Collective.
    """
    if world.processes == 1:
        return
    layers, skips = tuple(layer.name for layer in chain.layers), schedule.skips if schedule else ()
    mine = _Fingerprint(plan, layers, _digests(chain.parameters), skips)
    for rank, other in enumerate(world.gather(mine)):
        if other.layers != mine.layers:
            raise PlanError(
                f"rank {rank} has a model of layers {list(other.layers)} and rank {world.rank} of {list(mine.layers)}: "
                "build the same model on every rank"
            )
        if other.plan != mine.plan:
            raise PlanError(
                f"rank {rank} and rank {world.rank} have different plans:\n{other.plan}\n{mine.plan}\n"
                "Two profiles never agree exactly: plan on one rank and give the plan to all, or load it from a file"
            )
        if other.skips != mine.skips:
            raise PlanError(
                f"rank {rank} sends directly between the stages {other.skips} and rank {world.rank} between "
                f"{mine.skips}: pass the same skips=, and samples of the same shapes, on every rank"
            )
        different = [name for name, digest in mine.parameters.items() if other.parameters.get(name) != digest]
        if different:
            raise PlanError(
                f"rank {rank} and rank {world.rank} start from different weights: {_some(different)}. Every rank must "
                "build the whole model identically: call torch.manual_seed(...) with one seed before building it"
            )


def _digests(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """A short digest of every parameter: shape, type and sum."""
    result = {}
    for name, parameter in parameters.items():
        total = 0.0 if parameter.is_meta else float(parameter.detach().sum(dtype=torch.float64))
        facts = repr((tuple(parameter.shape), parameter.dtype, total))
        result[name] = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
    return result


def _distinct(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Each parameter once, under its first name."""
    seen: dict[int, str] = {}
    for name, parameter in parameters.items():
        seen.setdefault(id(parameter), name)
    return {name: parameters[name] for name in seen.values()}


def _some(names: Sequence[str], count: int = 3) -> str:
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest > 0 else "")
