"""PipeDream's partitioner: layers to stages, stages to replicated ranks.

It finds the pipeline whose slowest stage or link is fastest [PipeDream 2019, section 3.1]. Where the text leaves a
choice, ours is:

  1. A single stage on all workers is a candidate at every level (the printed recurrence forgets it).
  2. At an upper level a stage takes whole servers, so a hierarchy cannot express 15 replicas and 1 on 4 servers of 4.
     The machine is therefore also planned as flat, at the speed of its slowest link; the better plan is returned.
  3. The all-reduce is a ring by default, ``2 (r-1)/r w/B`` per r microbatches; ``allreduce="shared"`` is the printed
     ``2 (r-1) w/B``, and ``"released"`` what the authors' program counts.
  4. Memory, which the text only mentions, excludes stages within the search, at every level and for every schedule, by
     what the stage keeps there.
  5. The latency of links is ignored, as in the paper; the simulator includes it.
  6. Devices may differ. Which of them are used, and in which order, is then part of the search (`unequal_machines`).
"""

from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np

from penstock.errors import PlanError
from penstock.planning.memory import chunks_in_flight, overfull_rank
from penstock.planning.pipedream.interleaving import cut_interleaved
from penstock.planning.pipedream.recurrence import Hierarchy, MachineLevel
from penstock.planning.pipedream.unequal_machines import fastest_unequal
from penstock.planning.predictions import predict, prediction_of, slowest_part
from penstock.planning.requests import Request, Room
from penstock.planning.stage_costs import ChainCosts, Counts, Matrix
from penstock.values.chain_cuts import StageSeconds, cut_evenly, least_bottleneck
from penstock.values.clusters import Cluster
from penstock.values.link_tables import LinkLevels
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import Profile


def find_pipedream(profile: Profile, cluster: Cluster, request: Request) -> Plan | None:
    """The plan whose slowest stage or link is fastest; its time is `predicted.bottleneck_seconds`.

    None if nothing fits. `request.straight` allows no replicas: every device is a stage, or the first `request.stages`
    devices are (a number of stages implies it). `interleaved` and `zb-v` are planned without replicas. Raises
    `PlanError` if there are more stages than layers or devices.
    """
    if not cluster.is_equal and not request.definition.layout.has_several:
        return next(iter(find_unequal(profile, cluster, request)), None)
    costs = request.costs(profile, cluster)
    alone = _is_unreplicated(request)
    candidates = [_straight(costs, cluster, request)] if alone else _replicated(costs, cluster, request)
    fitting = []
    for seconds, stages in candidates:
        if seconds < inf:
            plan = request.arrange(stages, profile)
            peaks = request.peaks(plan, costs)
            if overfull_rank(peaks, cluster) is None:
                fitting.append((seconds, plan))
    if not fitting:
        return None
    seconds, plan = min(fitting, key=lambda candidate: candidate[0])
    _, limit = slowest_part(plan.stages, costs, cluster, request.allreduce)
    return replace(plan, predicted=predict(plan, profile, costs, seconds, request, limit=limit))


def find_unequal(profile: Profile, cluster: Cluster, request: Request) -> tuple[Plan, ...]:
    """The best plan on every number of devices of `cluster`, which differ, fastest first; none if nothing fits.

    `request.stages` fixes the number of stages, as devices without replicas. Raises `PlanError` if there are too few
    devices for them, or too many different ones.
    """
    request.stage_count(cluster.devices)
    costs = request.costs(profile, cluster)
    limited = cluster.least_memory_bytes is not None
    room = Room(request, cluster.devices, inf) if limited else None
    straight = _is_unreplicated(request)
    candidates = fastest_unequal(costs, cluster, straight=straight, allreduce=request.allreduce, room=room)
    found = []
    for used, (seconds, stages) in candidates.items():
        if request.stages not in (None, len(used)):
            continue
        plan = request.arrange(stages, profile, cluster)
        part = plan.used(cluster)
        own = request.costs(profile, part)
        if overfull_rank(request.peaks(plan, own), part) is None:
            _, limit = slowest_part(plan.stages, own, part, request.allreduce)
            predicted = predict(plan, profile, own, seconds, request, limit=limit)
            found.append(replace(plan, predicted=predicted))
    return tuple(sorted(found, key=lambda plan: prediction_of(plan).minibatch_seconds))


def _is_unreplicated(request: Request) -> bool:
    return request.straight or request.stages is not None or request.definition.layout.has_several


def _straight(costs: ChainCosts, cluster: Cluster, request: Request) -> tuple[float, tuple[Stage, ...]]:
    """The slowest seconds and the stages of the best plan without replicas, on the first ranks."""
    stages = request.stage_count(cluster.devices)
    ranks = stages // request.stages_per_rank
    if costs.layers < stages:
        raise PlanError(
            f"cannot cut {costs.layers} layers into {stages} stages: expected at least one layer per stage. "
            "Use fewer stages (stages=), or capture the model in finer layers"
        )
    stage_ranks = request.definition.layout.ranks(stages, ranks)
    bandwidths = [min(cluster.bandwidth(a, b), cluster.bandwidth(b, a)) for a, b in pairwise(stage_ranks)]
    exchange = [costs.exchange_seconds(bandwidth) for bandwidth in bandwidths]
    least = cluster.least_memory_bytes
    size_bytes = inf if least is None else least
    if request.definition.layout.has_several:
        in_flight = chunks_in_flight(ranks, request.stages_per_rank, request.microbatches, request.schedule)
        deal = cut_interleaved(
            costs, exchange, in_flight, size_bytes, request.optimizer_copies, stage_ranks=stage_ranks
        )
        limit, cuts = (deal.seconds, deal.cuts) if deal.worst_bytes <= size_bytes else (inf, ())
    else:
        room = None if least is None else Room(request, ranks, size_bytes)
        seconds = _stage_seconds(costs, room, ranks)
        limit = least_bottleneck(seconds, exchange)
        cuts = cut_evenly(seconds, exchange, limit) if limit < inf else ()
    return limit, tuple(Stage(i, j, (at,)) for at, (i, j) in zip(stage_ranks, pairwise(cuts), strict=False))


def _stage_seconds(costs: ChainCosts, room: Room | None, ranks: int) -> StageSeconds:
    """The seconds of a stage on one of `ranks` ranks, where it fits in `room`."""
    if room is None:
        return lambda stage, starts: costs.seconds[starts]

    def fitting(stage: int, starts: Counts) -> Matrix:
        counts = room.counts(1, ranks - stage)
        return np.where(room.fitting(costs, counts, starts), costs.seconds[starts], inf)

    return fitting


def _replicated(costs: ChainCosts, cluster: Cluster, request: Request) -> list[tuple[float, tuple[Stage, ...]]]:
    """The slowest seconds and the stages of the best plans: hierarchical, if there are several levels, and flat.

    The hierarchical plan comes first, so that it wins a tie: its links are the real ones.
    """
    limit = cluster.memory_bytes
    room = None if limit is None else Room(request, cluster.devices, limit)
    flat = MachineLevel(cluster.devices, cluster.slowest, request.allreduce)
    machines: list[tuple[MachineLevel, ...]] = [(flat,)]
    if isinstance(cluster.links, LinkLevels):
        levels = tuple(MachineLevel(*level, request.allreduce) for level in cluster.levels if level[0] > 1)
        if len(levels) > 1:
            machines = [levels, (flat,)]
    found = [Hierarchy(costs, levels, room).fastest() for levels in machines]
    return [(seconds, tuple(Stage(*stage) for stage in stages)) for seconds, stages in found]
