"""Starts the engine of a process: connects the ranks, builds the stages, and makes their optimizers and workers.

An edge costs time when a pipeline starts, and a communicator over a network, so a pair of ranks that never send each
other messages has none.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from penstock.capturing.chain import LayerChain, StageModule, crossings_of
from penstock.capturing.module_copies import Copies
from penstock.runtime.assembly.parallelize_hooks import ParallelStages, sharded_modules
from penstock.runtime.assembly.pipeline_options import RunOptions
from penstock.runtime.assembly.scheduled_plans import ScheduledPlan, distinct_parameters, starts_of, tied_parameters
from penstock.runtime.devices.host_copies import HostCopier
from penstock.runtime.devices.host_stores import MemoryStore, make_host_store
from penstock.runtime.devices.local_devices import DeviceContext, make_device_context
from penstock.runtime.devices.timestamps import Timestamp
from penstock.runtime.engine.call_agreement import call_edges
from penstock.runtime.engine.coded_messages import CodedMessages
from penstock.runtime.engine.engine import Engine
from penstock.runtime.engine.forwards import Forwards
from penstock.runtime.engine.gradients import Gradients
from penstock.runtime.engine.local_stage import LocalStage, LocalStages, parameters_of
from penstock.runtime.engine.loss_head import LossHead
from penstock.runtime.engine.mailbox import Mailbox
from penstock.runtime.engine.snapshots import Snapshots
from penstock.runtime.engine.worker import Worker
from penstock.runtime.execution.offloading import Offloads
from penstock.runtime.parameters.gradient_buckets import Reducer, ShardedReducer
from penstock.runtime.parameters.gradient_norms import GradientNorms
from penstock.runtime.parameters.host_states import HostStates, check_steps_apart
from penstock.runtime.parameters.optimizer_steps import Updater
from penstock.runtime.parameters.residence import Residence, StreamedWeights
from penstock.runtime.parameters.shards import dimensions_of
from penstock.runtime.parameters.version_slots import ComputeWeights
from penstock.runtime.parameters.weight_shares import WeightShares, assign_owners
from penstock.runtime.parameters.weight_versions import Sharers, VersionedWeights
from penstock.runtime.transport.tensor_parallel_transport import connect_tensor_parallel
from penstock.runtime.transport.transport import Channel, Edge, Transport
from penstock.runtime.transport.worlds import World
from penstock.scheduling.lowering import partners
from penstock.scheduling.schedules import Schedule
from penstock.training.optimizers import make_optimizers
from penstock.training.recipes import Recipe
from penstock.training.scaling import LossScaler
from penstock.values.crossings import find_stops, find_way
from penstock.values.plans import Plan


def start_engine(
    world: World,
    planned: ScheduledPlan,
    own: ParallelStages,
    recipe: Recipe,
    run: RunOptions,
    *,
    device: torch.device,
    opened: ExitStack,
) -> tuple[Engine, Updater]:
    """The engine over a worker for each rank of this process, and what steps their optimizers. Collective.

    `own`: the stages of this process. What has to be closed is put on `opened`.
    """
    chain, plan, schedule = own.chain, planned.plan, planned.schedule
    transport = connect_tensor_parallel(
        world,
        edges_of(schedule, sorted(buffered_stages(world, plan, chain, schedule, own.modules))),
        device=device,
        timeout_seconds=run.timeout_seconds,
        # For each replicated stage its ranks in replica order, which sum gradients. Each group once.
        groups=tuple(dict.fromkeys(ranks for ranks in schedule.placement.stages if len(ranks) > 1)),
        tp_group=own.tp_group,
        mesh_groups=own.mesh_groups,
    )
    opened.callback(transport.close)
    opened.callback(world.announce_leave)
    # Ranks that share weights in one window on the device compute in one stream.
    streams = planned.ranks[:1] if planned.state_on_host else planned.ranks
    context = make_device_context(device, streams, transport.check)
    # Weights that were made in it are there.
    host = own.host or HostStates(make_host_store(run.offload_to, context.staging), device)
    opened.callback(host.store.close)
    delays = schedule.guarantees.delays
    if schedule.streamed and device.type != "cpu":
        # It runs the model, whose weights are on the device still.
        chain.evaluation()
    stages = build_stages(
        planned,
        chain,
        transport=transport,
        modules=own.modules,
        compute_weights=[ComputeWeights(recipe.version_dtype, recipe.predicts(delay)) for delay in delays],
        context=context,
        host=host if planned.state_on_host else None,
        # An update divides by the scale of the loss before it takes norms, and learns it behind the sums.
        whole_sums=bool(recipe.scaling),
    )
    shares = {i: stage.shares for own in stages.values() for i, stage in own.items() if stage.shares is not None}
    updated = {name: parameter for each in shares.values() for name, parameter in each.updated.items()}
    optimizers = make_optimizers(recipe.optimizer, updated if shares else parameters_of(stages))
    for optimizer in optimizers if schedule.gathers else ():
        check_steps_apart(optimizer, of_replicas=True)
    together = schedule.definition.updates_at_once
    held = {index for each in stages.values() for index in each}
    updater = Updater(
        optimizers,
        held,
        recipe.lr_scheduler,
        recipe.hooks,
        delays,
        together=together,
        host=host if planned.state_on_host else None,
        shares=shares,
    )
    workers = make_workers(
        recipe,
        schedule,
        chain,
        stages,
        counted=counted_parameters(plan, chain),
        updater=updater,
        transport=transport,
        context=context,
        store=host.store,
    )
    engine = Engine(schedule, stages, workers, transport, context=context, seed=run.seed)
    engine.calls.watch = world.watch
    return engine, updater


def make_workers(
    recipe: Recipe,
    schedule: Schedule,
    chain: LayerChain,
    stages: LocalStages,
    counted: Mapping[int, Mapping[str, nn.Parameter]],
    updater: Updater,
    transport: Transport,
    context: DeviceContext,
    store: MemoryStore,
) -> list[Worker]:
    """A worker for each rank of this process. `counted`: by stage, the parameters that count in its norm. `store`:
    keeps what is offloaded.
    """
    workers = []
    host = None if schedule.flushes else updater.host
    snapshots = Snapshots(HostCopier(context.staging, context.device), host)
    for rank, own in stages.items():
        norms = GradientNorms(counted, chain.parameters, recipe.clip_grad_norm, context.device)
        scaler = LossScaler(recipe.scaling) if recipe.scaling else None
        gradients = Gradients(rank, schedule, own, norms if schedule.norms else None, scaler)
        heads = {
            index: LossHead(rank, chain, recipe.loss_fn, gradients.weigh, checks=recipe.checks_losses)
            for index in own
            if index == schedule.stages - 1
        }
        autocast = partial(torch.autocast, context.device.type, dtype=recipe.autocast) if recipe.autocast else None
        worker = Worker(
            rank=rank,
            stages=own,
            mailbox=Mailbox(
                rank,
                schedule,
                transport,
                coded=CodedMessages(transport, recipe.codec, context.device) if recipe.codec else None,
            ),
            inputs=chain.inputs,
            forwards=Forwards(own, heads, autocast, Offloads(store, context.device)),
            heads=heads,
            gradients=gradients,
            updater=updater,
            snapshots=snapshots,
            weights=[stage.weights for each in stages.values() for stage in each.values()],
            now=context.timer.now,
        )
        workers.append(worker)
    return workers


def buffered_stages(
    world: World, plan: Plan, chain: LayerChain, schedule: Schedule, modules: Mapping[int, StageModule]
) -> frozenset[int]:
    """The replicated stages whose modules have buffers. `modules`: those of this process that a hook has changed.
    Collective if there are replicas.
    """
    replicated = [stage for stage, ranks in enumerate(schedule.placement.stages) if len(ranks) > 1]
    if not replicated:
        return frozenset()
    mine = set()
    for index in replicated:
        stage = plan.stages[index]
        module = modules[index] if index in modules else chain.stage(stage.start, stage.stop)
        if any(True for _ in module.buffers()):
            mine.add(index)
    # A hook may have added buffers to a stage in the processes that hold it.
    return frozenset().union(*world.gather(mine, "while they compared the buffers of replicas"))


def edges_of(schedule: Schedule, buffered: Collection[int]) -> tuple[Edge, ...]:
    """The edges that messages travel on.

    They lead both ways between neighbour stages and between stages that share weights or a skip, if a microbatch or a
    gradient goes that way; from the last stage to every rank; both ways between the first rank of the last stage and
    every other one; and from the first replica of each stage in `buffered` to the others.
    """
    stages = schedule.placement.stages
    edges: dict[Edge, None] = {}
    for here, there in (*pairwise(stages), *((stages[a], stages[b]) for a, b in schedule.skips)):
        for one, other in _partners(here, there, schedule.placement.split):
            edges.update({Edge(one, other): None, Edge(other, one): None})
    for group in schedule.ties:
        for ranks in zip(*(stages[stage] for stage in group), strict=True):
            edges.update({Edge(here, there): None for here in ranks for there in ranks})
    edges.update({Edge(last, rank, Channel.REPORTS): None for last in stages[-1] for rank in range(schedule.ranks)})
    edges.update({Edge(stages[stage][0], rank, Channel.BUFFERS): None for stage in buffered for rank in stages[stage]})
    edges.update(dict.fromkeys(call_edges(schedule.ranks, stages[-1][0])))
    return tuple(edge for edge in edges if edge.source != edge.target)


def _partners(here: tuple[int, ...], there: tuple[int, ...], split: bool) -> list[tuple[int, int]]:
    """The pairs of replicas of neighbour stages between which some microbatch passes."""
    if split:
        return [(one, other) for one in here for other in there]
    rounds = math.lcm(len(here), len(there))
    return [(here[k % len(here)], there[k % len(there)]) for k in range(rounds)]


def _reroute(module: StageModule, index: int, schedule: Schedule, plan: Plan, chain: LayerChain) -> None:
    """Changes which values the module of stage `index` receives and sends, by the skips of `schedule`."""
    if not schedule.skips:
        return
    sources: dict[str, int] = {}
    targets = dict.fromkeys(module.sent, 1) if index == schedule.stages - 1 else {}
    for crossing in crossings_of(chain):
        way = find_way(find_stops(crossing, starts_of(plan)), schedule.skips)
        if index in way:
            position = way.index(index)
            if position > 0:
                sources[crossing.name] = index - way[position - 1]
            if position + 1 < len(way):
                targets[crossing.name] = way[position + 1] - index
    module.reroute(sources, targets)


def counted_parameters(plan: Plan, chain: LayerChain) -> dict[int, dict[str, nn.Parameter]]:
    """By stage, the trained parameters that no earlier stage uses: its share of a norm over all stages."""
    counted: dict[int, dict[str, nn.Parameter]] = {index: {} for index in range(len(plan.stages))}
    for name, parameter in distinct_parameters(chain.parameters).items():
        first = min(chain.readers[name], default=None)
        if first is not None and parameter.requires_grad:
            (index,) = (index for index, stage in enumerate(plan.stages) if stage.start <= first < stage.stop)
            counted[index][name] = parameter
    return counted


def _stage_parameters(chain: LayerChain, module: StageModule) -> dict[str, nn.Parameter]:
    """The parameters that `module` uses, each once, under its first name in the model."""
    used = {id(parameter) for parameter in module.parameters()}
    return {name: p for name, p in distinct_parameters(chain.parameters).items() if id(p) in used}


def build_stages(
    planned: ScheduledPlan,
    chain: LayerChain,
    *,
    transport: Transport,
    modules: Mapping[int, StageModule],
    compute_weights: Sequence[ComputeWeights],
    context: DeviceContext,
    host: HostStates | None = None,
    whole_sums: bool = False,
) -> dict[int, dict[int, LocalStage]]:
    """The stages of this process by its ranks, both ascending. `modules`: those that a hook has changed.
    `compute_weights`: by stage, the weights that its forwards read. `host`: has what is on the host: versions, and the
    weights of streamed stages, which move there. `whole_sums`: each replica receives the sums of all gradients,
    whatever it updates.

    The first of the replicas of a stage that live in this process holds the model's own parameters and buffers.
    """
    plan, schedule, ranks = planned.plan, planned.schedule, planned.ranks
    shared = tied_parameters(plan, chain)
    firsts: dict[int, LocalStage] = {}
    shared_weights: dict[str, VersionedWeights] = {}
    tied = Sharers()
    streamed = StreamedWeights(host) if host is not None and schedule.streamed else None
    for index in sorted({stage for rank in ranks for stage in schedule.stages_of(rank)}):
        start, stop = plan.stages[index].start, plan.stages[index].stop
        module = modules[index] if index in modules else chain.stage(start, stop)
        _reroute(module, index, schedule, plan, chain)
        parameters = _stage_parameters(chain, module)
        if streamed is not None and index in schedule.streamed:
            streamed.adopt(parameters, index, compute_weights[index])
        weights = VersionedWeights(
            module,
            parameters,
            schedule.versions(index),
            lent={name: shared_weights[name] for name in parameters if name in shared_weights},
            sharers=tied if any(name in shared for name in parameters) else None,
            compute_weights=compute_weights[index],
            swapped=bool(sharded_modules(module)),
            host=None if host is None else host.store.memory,
        )
        # The first of the stages in a process that share a weight updates it.
        for name in parameters:
            if name in shared:
                shared_weights.setdefault(name, weights)
        # A module that a hook has changed is not captured again. Its version 0 is the newest after a drain.
        changed = modules.get(index)
        firsts[index] = LocalStage(
            weights,
            evaluation=_evaluation(chain, start, stop, changed),
            ties={
                partner: tuple(name for name, sharing in shared.items() if index in sharing and partner in sharing)
                for partner in partners(index, schedule.ties)
            },
        )
    stages: dict[int, dict[int, LocalStage]] = {rank: {} for rank in ranks}
    counted = counted_parameters(plan, chain) if schedule.gathers else {}
    for rank, own in stages.items():
        loads = [0] * max(map(schedule.placement.replicas, schedule.stages_of(rank)))
        for index in schedule.stages_of(rank):
            first, group = firsts[index], schedule.placement.stages[index]
            owner = next(member for member in group if member in stages)
            weights = first.weights if rank == owner else first.weights.replica()
            late = {name for names in first.ties.values() for name in names}
            reducer = shares = owners = None
            # Replicas in one process have one set of weights, and one optimizer.
            if schedule.gathers and len(group) > 1 and not any(other in ranks for other in group if other != rank):
                owners = assign_owners(weights.trained, loads)
                shares = WeightShares(
                    *(transport, group, rank, index), owners=owners, stepped=weights.stepped, norms=len(counted[index])
                )
            if len(group) > 1:
                reducer = _reducer(
                    weights,
                    transport,
                    group=group,
                    rank=rank,
                    stage=index,
                    late=late,
                    now=context.timer.now,
                    owners=None if whole_sums else owners,
                )
            others = {other for stage in (index, *first.ties) for other in schedule.placement.stages[stage]}
            own[index] = LocalStage(
                weights,
                evaluation=first.evaluation,
                ties=first.ties,
                reducer=reducer,
                shares=shares,
                recomputes=planned.granularities.get(index),
                order=context.streams.order(rank, sorted(others.intersection(ranks) - {rank})),
                residence=Residence(streamed, weights.parameters) if streamed and index in schedule.streamed else None,
            )
    return stages


def replace_stages(engine: Engine, plan: Plan, chain: LayerChain) -> None:
    """Has the stages of `engine` run the layers of `chain` by `plan`, over the weights that they have."""
    firsts: dict[int, StageModule] = {}
    for own in engine.stages.values():
        for index, stage in own.items():
            start, stop = plan.stages[index].start, plan.stages[index].stop
            if index in firsts:
                module = Copies([firsts[index]]).of(firsts[index])
            else:
                module = firsts[index] = chain.stage(start, stop)
                _reroute(module, index, engine.schedule, plan, chain)
            stage.weights.replace(module)
            stage.evaluation = _evaluation(chain, start, stop)
    engine.use_chain(chain)


def _evaluation(
    chain: LayerChain, start: int, stop: int, own: StageModule | None = None
) -> Callable[[], Callable[..., tuple[Tensor, ...]]]:
    return cache(lambda: own or chain.evaluation().stage(start, stop))


def _reducer(
    weights: VersionedWeights,
    transport: Transport,
    *,
    group: tuple[int, ...],
    rank: int,
    stage: int,
    late: Collection[str],
    now: Callable[[], Timestamp],
    owners: Mapping[str, int] | None,
) -> Reducer:
    trained = {name: p for name, p in weights.parameters.items() if p.requires_grad}
    if modules := sharded_modules(weights.stage):
        whole = {name: p for name, p in trained.items() if "dp" not in dimensions_of(p)}
        return ShardedReducer(
            transport, group=group, rank=rank, stage=stage, parameters=whole, modules=modules, now=now
        )
    return Reducer(
        transport, group=group, rank=rank, stage=stage, parameters=trained, late=late, now=now, owners=owners
    )
