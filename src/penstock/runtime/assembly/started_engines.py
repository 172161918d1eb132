"""Starts the engine of a process: connects the ranks, builds the stages, and makes their optimizers and workers."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch

from penstock.capturing.chain import LayerChain
from penstock.runtime.assembly.connections import buffered_stages, connect
from penstock.runtime.assembly.parallelize_hooks import ParallelStages
from penstock.runtime.assembly.stages import build_stages, counted_parameters, learning_rate_factors
from penstock.runtime.devices.device_context import make_device_context
from penstock.runtime.engine.engine import Engine, make_workers, parameters_of
from penstock.runtime.engine.prediction_check import make_prediction_check
from penstock.runtime.execution.recomputation import Granularity
from penstock.runtime.parameters.optimizer_steps import Updater
from penstock.runtime.parameters.weight_versions import ComputeWeights
from penstock.runtime.transport.worlds import World
from penstock.scheduling.schedules import Schedule
from penstock.training.optimizers import make_optimizers
from penstock.training.recipes import Recipe
from penstock.values.plans import Plan


def start_engine(
    world: World,
    plan: Plan,
    chain: LayerChain,
    schedule: Schedule,
    recipe: Recipe,
    *,
    ranks: Sequence[int],
    parallel: ParallelStages,
    granularities: Mapping[int, Granularity],
    device: torch.device,
    seed: int | None,
    timeout_seconds: float,
    opened: ExitStack,
) -> tuple[Engine, Updater]:
    """The engine over a worker for each of the `ranks` of this process, and what steps their optimizers. Collective.

    `parallel`: the stages that a hook has changed. `granularities`: how stages recompute. What has to be closed is put
    on `opened`.
    """
    transport = connect(
        world,
        schedule,
        buffered=buffered_stages(world, plan, chain, schedule, parallel.modules),
        device=device,
        timeout_seconds=timeout_seconds,
        tp_group=parallel.tp_group,
    )
    opened.callback(transport.close)
    opened.callback(world.announce_leave)
    context = make_device_context(device, ranks, transport.check)
    delays = schedule.guarantees.delays
    stages = build_stages(
        plan,
        chain,
        schedule,
        ranks=ranks,
        transport=transport,
        granularities=granularities,
        modules=parallel.modules,
        compute_weights=[ComputeWeights(recipe.version_dtype, recipe.predicts(delay)) for delay in delays],
        context=context,
    )
    optimizers = make_optimizers(recipe.optimizer, parameters_of(stages))
    factors = learning_rate_factors(schedule, stages, recipe.scale_learning_rates)
    together = schedule.definition.updates_at_once
    updater = Updater(optimizers, factors, recipe.lr_scheduler, recipe.hooks, delays, together=together)
    workers = make_workers(
        recipe,
        schedule,
        chain,
        stages,
        counted=counted_parameters(plan, chain),
        updater=updater,
        transport=transport,
        context=context,
    )
    check = make_prediction_check(plan, schedule.flushes, world, context.timer)
    return Engine(schedule, stages, workers, transport, check=check, context=context, seed=seed), updater
