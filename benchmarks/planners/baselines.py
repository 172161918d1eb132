"""The synchronous baselines that the planner SPP is compared with.

Source: SPP (Luo et al., INFOCOM 2022, section V): all run m microbatches and then update once.

    data parallelism   one stage on all devices; every microbatch is split over them
    GPipe              a stage per device with equally many layers; all forwards, then all backwards
    PipeDream          the partition of SOSP'19, with replicas that take turns; 1F1B with a flush
    HetPipe            virtual workers of k devices, each a straight pipeline over the whole model with stages as equal
                       as they can be; d = V / k of them in parallel, data parallel; 1F1B with a flush

HetPipe (Park et al., ATC 2020) takes the devices of a virtual worker from one server (its `node-partition`). The
pipeline then has the fast links and the all-reduce the slow ones.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil

import numpy as np

from penstock.errors import PlanError
from penstock.planning.memory import interval_bytes, require_fit
from penstock.planning.requests import Request
from penstock.planning.spp.device_orders import link_latencies, link_speeds
from penstock.planning.spp.spp_search import evaluate_for
from penstock.planning.stage_costs import ChainCosts, Counts, Matrix, chain_costs
from penstock.scheduling.orders import GPIPE, ONE_F_ONE_B_FLUSH
from penstock.values.chain_cuts import cut_evenly, least_bottleneck
from penstock.values.clusters import Cluster
from penstock.values.link_tables import LinkLevels
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text
from planners.single_planners import plan_pipedream

__all__ = ["plan_data_parallel", "plan_gpipe", "plan_hetpipe", "plan_synchronous_pipedream", "servers_of"]


def plan_data_parallel(profile: Profile, cluster: Cluster, request: Request) -> Plan:
    """One stage on all devices, every microbatch split over them. `PlanError` if it does not fit in memory."""
    stages = (Stage(0, len(profile), tuple(range(cluster.devices))),)
    return _predicted(_plan(stages, ONE_F_ONE_B_FLUSH.name, profile, request, split=True), profile, cluster, request)


def plan_gpipe(profile: Profile, cluster: Cluster, request: Request) -> Plan:
    """Equally many layers on every device, the earlier ones with the remainder; on as many devices as there are layers.

    `request.stages` takes that number of devices instead, the first ones. `PlanError` if that is more than there are
    layers or devices, or if it does not fit in memory.
    """
    count = min(cluster.devices, len(profile)) if request.stages is None else request.stages
    count = replace(request, schedule=GPIPE.name, stages=count, stages_per_rank=1).stage_count(cluster.devices)
    stages = Plan.uniform(len(profile), count).stages
    return _predicted(_plan(stages, GPIPE.name, profile, request), profile, cluster, request)


def plan_synchronous_pipedream(profile: Profile, cluster: Cluster, request: Request) -> Plan:
    """PipeDream's partition for `request`, run as 1F1B with a flush. `PlanError` as `plan_pipedream` raises it."""
    flushed = replace(request, schedule=ONE_F_ONE_B_FLUSH.name, vertical_sync=False, stages_per_rank=1)
    return _predicted(plan_pipedream(profile, cluster, flushed), profile, cluster, request)


def plan_hetpipe(profile: Profile, cluster: Cluster, request: Request) -> Plan:
    """Equal straight pipelines in parallel: stage s is on the s-th device of every server (see `servers_of`).

    `PlanError` if a server has more devices than the model has layers, or if nothing fits in memory.
    """
    workers = servers_of(cluster)
    stages = len(workers[0])
    if stages > len(profile):
        raise PlanError(
            f"HetPipe: cannot cut {len(profile)} layers into {stages} stages: expected at least one layer for each "
            f"device of a server, found {stages} devices"
        )
    fitting = _fitting(profile, cluster, request, stages, len(workers))

    def stage_seconds(stage: int, starts: Counts) -> Matrix:
        return fitting[stage][starts]

    exchange = _exchange_seconds(chain_costs(profile), cluster, workers)
    limit = least_bottleneck(stage_seconds, exchange)
    cuts = cut_evenly(stage_seconds, exchange, limit) if limit < np.inf else ()
    if not cuts:
        raise PlanError(
            f"HetPipe: nothing fits: expected {stages} stages that fit in {bytes_text(cluster.memory_bytes or 0)} "
            "each, found none. Use smaller microbatches, or recompute=True"
        )
    held = tuple(Stage(i, j, ranks) for (i, j), ranks in zip(pairwise(cuts), zip(*workers, strict=True), strict=True))
    return _predicted(_plan(held, ONE_F_ONE_B_FLUSH.name, profile, request), profile, cluster, request)


def servers_of(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """The devices of each server, which is the innermost level; all devices together if there are no levels."""
    size = cluster.levels[0][0] if isinstance(cluster.links, LinkLevels) else cluster.devices
    return tuple(tuple(range(first, first + size)) for first in range(0, cluster.devices, size))


def _exchange_seconds(costs: ChainCosts, cluster: Cluster, workers: Sequence[tuple[int, ...]]) -> list[Matrix]:
    """The seconds of activations and gradients over the slowest of the workers' links, of every cut, at every layer."""
    speeds, latencies = link_speeds(cluster), link_latencies(cluster)
    seconds = []
    for hops in zip(*(tuple(pairwise(worker)) for worker in workers), strict=True):
        slowest = min(speeds[hop] for hop in hops)
        seconds.append(costs.exchanged_bytes / slowest + 2 * max(latencies[hop] for hop in hops))
    return seconds


def _fitting(profile: Profile, cluster: Cluster, request: Request, stages: int, workers: int) -> list[Matrix]:
    """The seconds of all intervals of layers, for every stage; infinite where they do not fit."""
    plain, costs = chain_costs(profile), chain_costs(profile, recompute=request.recompute)
    in_flight = [min(ceil(request.microbatches / workers), stages - stage) for stage in range(stages)]
    # One alone has nothing to recompute: its backward directly follows its forward.
    own = [costs if count > 1 else plain for count in in_flight]
    if cluster.memory_bytes is None:
        return [stage.seconds for stage in own]
    memory = cluster.memory_bytes
    return [
        np.where(interval_bytes(stage, count, 1, request.optimizer_copies) <= memory, stage.seconds, np.inf)
        for stage, count in zip(own, in_flight, strict=True)
    ]


def _plan(stages: tuple[Stage, ...], schedule: str, profile: Profile, request: Request, *, split: bool = False) -> Plan:
    return Plan(
        stages,
        schedule,
        request.microbatches,
        profile.microbatch_size,
        recompute=request.recompute,
        routing="split" if split else "round-robin",
    )


def _predicted(plan: Plan, profile: Profile, cluster: Cluster, request: Request) -> Plan:
    """`plan` with what the simulator says of it; `PlanError` if it does not fit in memory."""
    outcome = evaluate_for(request, plan, profile, cluster)
    require_fit(plan, outcome.peak_bytes, cluster)
    return replace(plan, predicted=outcome)
