"""From a plan and a captured model to what each rank holds, before the first step.

All of it is checked here, once, so that a wrong plan, a model that differs between ranks or a combination that is not
supported ends with its reason instead of a hang.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import nn

from penstock.capturing.chain import LayerChain, StageModule
from penstock.errors import PlanError
from penstock.runtime.transport import Edge
from penstock.runtime.weights import VersionedWeights
from penstock.runtime.worker import LocalStage
from penstock.runtime.worlds import World
from penstock.scheduling.lowering import partners
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.schedules import schedule as schedule_of
from penstock.values.plans import Plan

__all__ = [
    "build_stages",
    "check_agreement",
    "check_plan",
    "choose_plan",
    "edges_of",
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
) -> Plan:
    """The plan to run: `plan` if there is one, else equal numbers of layers in `stages` stages (default: `processes`).

    With 'interleaved' `stages` counts all stages; a rank holds ``stages / processes`` of them, two by default. Raises
    `PlanError` if the arguments contradict each other.
    """
    if plan is None:
        per_rank = stages_per_rank(schedule, stages, processes)
        total = stages if stages is not None else processes * per_rank
        return Plan.uniform(
            layers,
            total,
            schedule=schedule or "1f1b-flush",
            microbatches=microbatches or 1,
            stages_per_rank=per_rank,
            vertical_sync=vertical_sync,
        )
    given = {
        "schedule": schedule,
        "microbatches": microbatches,
        "stages": stages,
        "vertical_sync": vertical_sync or None,
    }
    planned = {
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "stages": len(plan.stages),
        "vertical_sync": plan.vertical_sync,
    }
    for name, value in given.items():
        if value is not None and value != planned[name]:
            raise PlanError(
                f"{name}={value!r} contradicts the plan, which has {name} {planned[name]!r}: leave {name}= out, or "
                "change the plan"
            )
    return plan


def stages_per_rank(schedule: str | None, stages: int | None, processes: int) -> int:
    """``v`` where it is not said: 2 under `interleaved`, or what `stages` on so many `processes` makes of it."""
    if schedule != "interleaved":
        return 1
    if stages is None or processes == 1:
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
    for index, stage in enumerate(plan.stages):
        if len(stage.ranks) > 1:
            raise PlanError(
                f"stage {index} of the plan is replicated on ranks {list(stage.ranks)}: this version runs one rank per "
                "stage. Plan with straight=True"
            )
    if plan.recompute:
        raise PlanError("the plan recomputes activations: this version does not. Set recompute: false in the plan")


def make_schedule(plan: Plan, chain: LayerChain) -> Schedule:
    """The schedule of `plan`, which knows the stages of this model that share weights.

    `PlanError` if they do and the schedule does not flush, or a stage has replicas; `ScheduleError` if the plan's
    numbers do not fit it.
    """
    schedule = schedule_of(plan)
    if plan.ranks > schedule.placement.length:
        raise PlanError(
            f"the plan has {schedule.placement.text()} replicas of its stages (tensor_parallel "
            f"{plan.tensor_parallel}): expected one rank per stage. Such a plan can be verified, simulated and drawn; "
            "replicas run in a later version. Plan with straight=True to run now"
        )
    shared = _tied(plan, chain)
    if shared and not schedule.flushes:
        names = ", ".join(f"{name} (stages {', '.join(map(str, stages))})" for name, stages in shared.items())
        raise PlanError(
            f"weights are shared across stages: {names}. Under {plan.schedule!r} every stage updates at its own time, "
            "so the copies would drift apart. Use a flushing schedule (gpipe, 1f1b-flush, interleaved, spp), untie the "
            "weights, or plan the layers that share them into one stage"
        )
    return replace(schedule, ties=tuple(sorted(set(shared.values()))))


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


def _stage_parameters(chain: LayerChain, module: StageModule) -> dict[str, nn.Parameter]:
    """The parameters that `module` uses, each once, under the model's first name for it."""
    used = {id(parameter) for parameter in module.parameters()}
    return {name: p for name, p in _distinct(chain.parameters).items() if id(p) in used}


def build_stages(plan: Plan, chain: LayerChain, schedule: Schedule, local: Sequence[int]) -> dict[int, LocalStage]:
    """What this process holds: its stages `local`, ascending."""
    shared = _tied(plan, chain)
    stages: dict[int, LocalStage] = {}
    lent: set[str] = set()
    for index in local:
        start, stop = plan.stages[index].start, plan.stages[index].stop
        module = chain.stage(start, stop)
        parameters = _stage_parameters(chain, module)
        weights = VersionedWeights(
            module, parameters, schedule.versions(index), frozenset(lent.intersection(parameters))
        )
        # Of the stages of one process that share a weight, the first one updates it.
        lent.update(name for name in parameters if name in shared)
        stages[index] = LocalStage(
            weights,
            evaluation=cache(partial(_evaluation, chain, start, stop)),
            ties={
                partner: tuple(name for name, sharing in shared.items() if index in sharing and partner in sharing)
                for partner in partners(index, schedule.ties)
            },
        )
    return stages


def _evaluation(chain: LayerChain, start: int, stop: int) -> StageModule:
    return chain.evaluation().stage(start, stop)


def edges_of(schedule: Schedule) -> tuple[Edge, ...]:
    """The edges that messages travel on.

    Both ways between neighbour stages and between stages that share weights, and from the last stage to every rank.
    """
    last = schedule.rank_of(schedule.stages - 1)
    edges: dict[Edge, None] = {}
    for stage in range(schedule.stages - 1):
        here, there = schedule.rank_of(stage), schedule.rank_of(stage + 1)
        edges.update({Edge(here, there): None, Edge(there, here): None})
    for group in schedule.ties:
        ranks = [schedule.rank_of(stage) for stage in group]
        edges.update({Edge(here, there): None for here in ranks for there in ranks})
    edges.update({Edge(last, rank, "reports"): None for rank in range(schedule.ranks)})
    return tuple(edge for edge in edges if edge.source != edge.target)


@dataclass(frozen=True, slots=True)
class _Fingerprint:
    """What must be the same on every rank."""

    plan: Plan
    layers: tuple[str, ...]
    parameters: Mapping[str, str]


def check_agreement(world: World, plan: Plan, chain: LayerChain) -> None:
    """Raises `PlanError` on every rank if the ranks have different plans or models. Collective."""
    if world.processes == 1:
        return
    mine = _Fingerprint(plan, tuple(layer.name for layer in chain.layers), _digests(chain.parameters))
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
        total = float(parameter.detach().sum(dtype=torch.float64))
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
