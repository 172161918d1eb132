"""PipeDream's partitioner: layers to stages, stages to replicated ranks.

Source: "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP'19, section 3.1. It finds the pipeline
whose slowest stage or link is fastest. Where the text leaves a choice, ours is:

  1. A single stage on all workers is a candidate at every level (the printed recurrence forgets it).
  2. At an upper level a stage takes whole servers, so a hierarchy cannot express 15 replicas and 1 on 4 servers of 4.
     The machine is therefore also planned as flat, at the speed of its slowest link, and the better plan is returned.
  3. The all-reduce is a ring by default, ``2 (r-1)/r w/B`` per r microbatches; ``allreduce="shared"`` is the printed
     ``2 (r-1) w/B``. The authors' released program uses other costs again and will give other plans.
  4. Memory, which the text only mentions, excludes stages exactly on a flat machine and without replicas (the workers
     behind a stage are known there). In a hierarchy it is checked at the end, and the flat plan is the way out.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil, inf, prod
from typing import assert_never

from penstock.errors import PlanError
from penstock.planning.costs import ChainCosts, Flags, chain_costs, require_allreduce
from penstock.planning.memory import OPTIMIZER_COPIES, interval_bytes, live_counts, peak_bytes
from penstock.planning.predictions import predict, slowest_seconds
from penstock.planning.recurrence import Level, cheapest_pipeline, raise_level
from penstock.planning.requests import Request
from penstock.planning.straight import cut_evenly
from penstock.values.clusters import Cluster, LinkLevels, LinkMatrix
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import Profile

__all__ = ["noam", "partition", "plan_pipedream"]


def partition(
    profile: Profile,
    cluster: Cluster,
    *,
    straight: bool = False,
    allreduce: str = "ring",
    stages: int | None = None,
    schedule: str = "1f1b",
    microbatches: int = 1,
    optimizer_copies: float = OPTIMIZER_COPIES,
) -> Plan:
    """The plan whose slowest stage or link is fastest; its time is `predicted.bottleneck_seconds`.

    `straight` allows no replicas: every device is a stage, or the first `stages` devices are (`stages` implies it).
    `PlanError` if there are more stages than layers or devices, or nothing fits in the cluster's memory.
    """
    request = Request(
        schedule=schedule,
        microbatches=microbatches,
        stages=stages,
        straight=straight,
        allreduce=require_allreduce(allreduce),
        optimizer_copies=optimizer_copies,
    )
    return plan_pipedream(profile, cluster, request)


def plan_pipedream(profile: Profile, cluster: Cluster, request: Request) -> Plan:
    """As `partition`, for the options of `request`; `interleaved` is planned without replicas."""
    costs = chain_costs(profile, recompute=request.recompute)
    alone = request.straight or request.stages is not None or request.schedule == "interleaved"
    candidates = [_straight(costs, cluster, request)] if alone else _replicated(costs, cluster, request)
    fitting = []
    for seconds, stages in candidates:
        if seconds < inf:
            plan = request.arrange(stages, profile)
            peaks = peak_bytes(plan, costs, request.optimizer_copies)
            if cluster.memory_bytes is None or max(peaks) <= cluster.memory_bytes:
                fitting.append((seconds, plan))
    if not fitting:
        raise PlanError(
            f"nothing fits: expected a plan under {request.schedule} with at most "
            f"{(cluster.memory_bytes or inf) / 1e9:.4g} GB on each of {cluster.devices} devices, found none for "
            f"{profile.parameter_bytes / 1e9:.4g} GB of weights. Use more devices, smaller microbatches, "
            "recompute=True, or a schedule that keeps less (1f1b-flush)"
        )
    seconds, plan = min(fitting, key=lambda candidate: candidate[0])
    return replace(plan, predicted=predict(plan, profile, costs, seconds, request.optimizer_copies))


def noam(plan: Plan) -> int:
    """Microbatches that the input stage admits per replica to keep the pipeline full: ceil(workers / its replicas).

    SOSP'19 section 3.2: the number of optimal active minibatches.
    """
    return ceil(plan.ranks / len(plan.stages[0].ranks))


def _straight(costs: ChainCosts, cluster: Cluster, request: Request) -> tuple[float, tuple[Stage, ...]]:
    """The slowest rank or link of the best plan without replicas on the first ranks, and its stages."""
    stages = request.stage_count(cluster.devices)
    ranks = stages // request.stages_per_rank
    if costs.layers < stages:
        raise PlanError(
            f"cannot cut {costs.layers} layers into {stages} stages: expected at least one layer per stage. "
            "Use fewer stages (stages=), or capture the model in finer layers"
        )
    hops = [(stage % ranks, (stage + 1) % ranks) for stage in range(stages - 1)]
    bandwidths = [min(cluster.bandwidth(a, b), cluster.bandwidth(b, a)) for a, b in hops]
    fits = None
    if cluster.memory_bytes is not None and request.schedule != "interleaved":
        fits = [_fitting(costs, cluster.memory_bytes, request, ranks, 1, ranks - stage) for stage in range(stages)]
    _, cuts = cut_evenly(costs, bandwidths, fits)
    if not cuts:
        return inf, ()
    cut = tuple(Stage(i, j, (stage % ranks,)) for stage, (i, j) in enumerate(pairwise(cuts)))
    return slowest_seconds(cut, costs, cluster, request.allreduce), cut


def _replicated(costs: ChainCosts, cluster: Cluster, request: Request) -> list[tuple[float, tuple[Stage, ...]]]:
    """The slowest seconds and the stages of the best plans: hierarchical, if there are several levels, and flat.

    The hierarchical plan comes first, so that it is taken of equals: its links are the real ones.
    """
    machines: list[tuple[Level, ...]] = [(Level(cluster.devices, cluster.slowest, request.allreduce),)]
    match cluster.links:
        case LinkLevels(levels):
            hierarchy = tuple(Level(*level, request.allreduce) for level in levels if level[0] > 1)
            if len(hierarchy) > 1:
                machines.insert(0, hierarchy)
        case LinkMatrix():
            pass
        case _:
            assert_never(cluster.links)
    return [_solve(costs, cluster, machine, request) for machine in machines]


def _solve(
    costs: ChainCosts, cluster: Cluster, levels: tuple[Level, ...], request: Request
) -> tuple[float, tuple[Stage, ...]]:
    """The slowest seconds and the stages of the best plan on `levels`, innermost first."""
    below = [costs.seconds]
    for level in levels[:-1]:
        below.append(raise_level(costs, below[-1], level))
    flat_fits = None
    if cluster.memory_bytes is not None and len(levels) == 1:
        flat_fits = partial(_fitting, costs, cluster.memory_bytes, request, cluster.devices)

    def unfold(depth: int, start: int, stop: int) -> tuple[float, tuple[Stage, ...]]:
        """The stages of an interval on one component of level `depth`, with ranks from 0."""
        if depth < 0:
            return 0.0, (Stage(start, stop, (0,)),)
        pipeline = cheapest_pipeline(costs, below[depth], levels[depth], start, stop, flat_fits)
        size = prod(level.count for level in levels[:depth])
        stages: list[Stage] = []
        first = 0
        for block in pipeline.blocks:
            components = range(first, first + block.replicas)
            for stage in unfold(depth - 1, block.start, block.stop)[1]:
                ranks = tuple(component * size + rank for component in components for rank in stage.ranks)
                stages.append(Stage(stage.start, stage.stop, ranks))
            first += block.replicas
        return pipeline.seconds, tuple(stages)

    return unfold(len(levels) - 1, 0, costs.layers)


def _fitting(
    costs: ChainCosts, memory_bytes: float, request: Request, workers: int, replicas: int, behind: int
) -> Flags:
    """[i, j]: whether layers i up to and without j fit as a stage of `replicas` with `behind` workers from it on."""
    counts = live_counts(
        request.schedule, request.microbatches, replicas, behind, workers, vertical_sync=request.vertical_sync
    )
    fitting: Flags = interval_bytes(costs, *counts, request.optimizer_copies) <= memory_bytes
    return fitting
