"""The plan of a pipeline: the user's, one by the weights of the layers, or the fastest one (``plan="auto"``).

Rank 0 weighs, measures and plans, and tells all ranks: a model whose work depends on the data may do other work on
another rank's sample, and no two measurements agree exactly. Where layers are measured, so are the devices of all
ranks: a slow one gets fewer layers.

For ``plan="auto"`` all processes measure the model at the same time, since those of one host share its caches, memory
and clock, and will train at the same time, too. The seconds are scaled to what layers take together. The plan uses all
ranks, with replicas of a stage where that is faster. If no schedule is given, the plan has one that flushes, since a
planner must not change which gradients a step applies. For the same reason replicas do not split microbatches of a
model with BatchNorm, whose statistics would be those of a share of the microbatch. Every process is a rank, so that no
device is left out; `penstock plan` on the profile and cluster says whether that would be faster.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from penstock.capturing.chain import LayerChain, require_cuts
from penstock.capturing.work_estimates import estimate_seconds
from penstock.errors import PlanError, ScheduleError
from penstock.runtime.assembly.captured_models import CapturedModel
from penstock.runtime.assembly.pipeline_options import Balance, PipelineOptions, PlanOptions
from penstock.runtime.assembly.scheduled_plans import (
    LayerWeights,
    ScheduledPlan,
    choose_plan,
    distinct_parameters,
    make_schedule,
    schedule_plan,
)
from penstock.runtime.collectives.agreements import agreed, gather_results
from penstock.runtime.transport.worlds import World
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.values.clusters import Cluster
from penstock.values.crossings import Crossing
from penstock.values.device_kinds import DeviceKind
from penstock.values.plan_stages import Stage
from penstock.values.plans import Plan, Prediction
from penstock.values.profiles import LayerProfile, Profile

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class AutoPlan:
    """A plan, with the measurements that it was made from."""

    plan: Plan
    profile: Profile
    cluster: Cluster


def plan_pipeline(
    options: PipelineOptions, world: World, captured: CapturedModel
) -> tuple[ScheduledPlan, AutoPlan | None]:
    """The plan that `options` want for the `captured` model, with its schedule; and what ``plan="auto"`` measured.

    Collective. An error on one rank is raised on all.
    """
    plan, automatic = options.plan.plan_for(world.processes), None
    weights = weigh_layers(options, world, captured, planned=plan is not None)
    if isinstance(plan, str):
        automatic = plan_automatically(plan, options, world, captured)
        plan = automatic.plan
    with agreed(world, "while it read its plan"):
        chosen = choose_plan(plan, options.plan, weights, world.processes)
        planned = schedule_plan(chosen, captured.chain, options, world)
    if plan is None and world.rank == 0:
        _log_shares(planned.plan, weights, options.plan.balance)
    return planned, automatic


def weigh_layers(options: PipelineOptions, world: World, captured: CapturedModel, *, planned: bool) -> LayerWeights:
    """What each layer weighs by ``balance=``, the same on all ranks. Collective. `planned`: there is a plan, so the
    weights are not read. An error on one rank is raised on all.
    """
    balance, chain, sample = options.plan.balance, captured.chain, options.model.sample
    autocast = options.recipe.autocast

    def work() -> Sequence[float]:
        equal = [1.0] * len(chain.layers)
        if planned or world.rank != 0:
            return equal
        match balance:
            case "work":
                return _estimate(chain, captured.device) or equal
            case "measured":
                from penstock.profiling.profiler import profile as measure

                if any(parameter.is_meta for parameter in chain.parameters.values()):
                    raise PlanError(
                        "balance='measured' and the model is on the meta device, where nothing can be measured: use "
                        "balance='work', which needs no weights, or pass a plan"
                    )
                found = measure(chain, sample, optimizer=None, autocast=autocast, progress=False)
                return [layer.seconds for layer in found.layers]
            case "layers":
                return equal

    weights = gather_results(world, "while it weighed the layers", work)[0]
    if balance != "measured" or planned:
        return LayerWeights(tuple(weights), (), chain.shares)
    from penstock.profiling.training_loops import measure_speeds

    return LayerWeights(tuple(weights), measure_speeds(world, chain, sample, autocast), chain.shares)


def plan_automatically(plan: str, options: PipelineOptions, world: World, captured: CapturedModel) -> AutoPlan:
    """The fastest plan for the processes of `world`, the same on all. Collective.

    A single process has as many ranks as `options` give it stages (half as many where a rank holds two), and instant
    links between them. An error on one rank is raised on all.
    """
    from penstock.profiling.links import measure_host_bandwidth, measure_links
    from penstock.profiling.profiler import profile as measure
    from penstock.profiling.training_loops import as_in_training, measure_rounds, measure_speeds

    chain, sample, autocast = captured.chain, options.model.sample, options.recipe.autocast
    if plan != "auto":
        raise PlanError(
            f"plan=: expected a penstock.Plan or 'auto', found {plan!r}: load a file with penstock.Plan.load({plan!r})"
        )
    if world.processes > 1:
        cluster = measure_links(world, captured.device, options.run.offload_to)
    else:
        per_rank = options.plan.definition.layout.default_stages_per_rank(options.plan.stages, 1)
        cluster = Cluster.uniform(max(1, (options.plan.stages or 1) // per_rank), math.inf)
        if options.plan.memory_bytes is not None:
            bandwidth = measure_host_bandwidth(captured.device, options.run.offload_to)
            cluster = replace(cluster, host_bandwidth=bandwidth)
    if options.plan.memory_bytes is not None:
        cluster = cluster.with_memory(options.plan.memory_bytes)

    context = "while it measured the model and planned"
    with agreed(world, context):
        alone = measure(chain, sample, optimizer=None, autocast=autocast, wire_dtype=options.recipe.wire_dtype)
    # All begin together: a process that measures while the others are done has the host to itself.
    rounds = gather_results(world, context, lambda: measure_rounds(alone, chain, sample, autocast))
    if speeds := measure_speeds(world, chain, sample, autocast):
        cluster = cluster.with_kinds([DeviceKind(speed=speed) for speed in speeds])

    def work() -> tuple[dict[str, Any], dict[str, Any]] | None:
        if world.rank != 0:
            return None
        profile = as_in_training(alone, rounds)
        made = fastest_plan(profile, cluster, chain, options.plan, options.whole_backwards)
        values = {field.name: getattr(made, field.name) for field in fields(made)}
        # Every rank has the definition of a schedule of the user's own, which need not be one that can be pickled.
        named = made.schedule if isinstance(made.schedule, str) else None
        predicted = None if made.predicted is None else asdict(made.predicted)
        stages = tuple([(stage.start, stage.stop, stage.ranks) for stage in made.stages])
        return values | {"schedule": named, "predicted": predicted, "stages": stages}, asdict(profile)

    made = gather_results(world, context, work)[0]
    assert made is not None
    values, measured = made
    values["schedule"] = values["schedule"] or options.plan.schedule
    values["stages"] = tuple(Stage(*stage) for stage in values["stages"])
    values["predicted"] = values["predicted"] and Prediction(**values["predicted"])
    measured["layers"] = tuple(LayerProfile(**layer) for layer in measured["layers"])
    measured["crossings"] = tuple(Crossing(**crossing) for crossing in measured["crossings"])
    return AutoPlan(Plan(**values), Profile(**measured), cluster)


def fastest_plan(
    profile: Profile, cluster: Cluster, chain: LayerChain, wanted: PlanOptions, whole_backwards: bool = False
) -> Plan:
    """The fastest plan by `penstock.plan` that runs on all devices of `cluster`. `whole_backwards`: the stages cannot
    split a backward.

    If there is none, raises the error of the simplest plan; where memory is limited, that of the search.
    """
    from penstock.capturing.export.cutting import takes_statistics
    from penstock.planning.planners import plan as plan_on
    from penstock.planning.requests import PlannerName

    require_cuts(len(chain.layers), wanted.stages or 1, chain.shares)
    flushes = wanted.schedule is None and not wanted.vertical_sync
    search = partial(
        plan_on,
        profile,
        cluster,
        microbatches=wanted.microbatches,
        synchronous=flushes,
        vertical_sync=wanted.vertical_sync,
        whole_backwards=whole_backwards and wanted.schedule is None,
        state_on_host=wanted.state_on_host,
        shard_optimizer=wanted.shard_optimizer,
        tied_layers=[
            chain.readers[name]
            for name, parameter in distinct_parameters(chain.parameters).items()
            if parameter.requires_grad
        ],
    )
    per_rank = wanted.definition.layout.default_stages_per_rank(wanted.stages, cluster.devices)
    whole = any(takes_statistics(layer.module) for layer in chain.layers)
    # All planners, and if the best plan splits microbatches that must stay whole, the one that never does.
    for planner in (None, PlannerName.PIPEDREAM.value) if wanted.stages is None else ():
        with suppress(ScheduleError, *(() if wanted.memory_bytes else (PlanError,))):
            # Under `torchrun` every process is a rank.
            made = search(schedule=wanted.schedule, planner=planner, every_device=True)
            make_schedule(made, chain)
            if not (whole and made.routing == "split"):
                return made
    made = search(
        schedule=DEFAULT_SCHEDULE if flushes else wanted.schedule,
        stages=wanted.stages or cluster.devices * per_rank,
        stages_per_rank=per_rank,
    )
    make_schedule(made, chain)
    return made


def _log_shares(plan: Plan, weights: LayerWeights, balance: Balance) -> None:
    """Says in the log of ``penstock`` what share of the weight each stage of `plan` has."""
    total = sum(weights) or 1.0
    shares = [
        f"layers [{stage.start}, {stage.stop}) {sum(weights.layers[stage.start : stage.stop]) / total:.1%}"
        for stage in plan.stages
    ]
    kind = {"work": "estimated work", "layers": "layers", "measured": "measured seconds"}[balance]
    _log.info("stages by %s: %s", kind, ", ".join(shares))
    if weights.speeds:
        speeds = ", ".join(f"{speed:.2f}" for speed in weights.speeds)
        _log.info("the ranks are not equally fast (rank 0 is 1): %s", speeds)


def _estimate(chain: LayerChain, device: torch.device) -> Sequence[float] | None:
    found = estimate_seconds(chain, device)
    if found is None:
        _log.warning(
            "no layer runs an operator of PyTorch's, so their work is not known: stages get equal numbers of layers. "
            "balance='measured' measures the layers"
        )
    return found
