"""The least memory with which a plan of PipeDream fits, and single changes with which it fits in less."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import numpy as np

from penstock.planning.infeasibility import halves, wider_clusters
from penstock.planning.memory import Room, chunks_in_flight, interval_bytes
from penstock.planning.pipedream.flat_machines import fits_flat, least_peak_bytes
from penstock.planning.pipedream.interleaving import cut_interleaved
from penstock.planning.requests import Request
from penstock.planning.stage_costs import ChainCosts, Counts, Matrix, chain_costs
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.values.chain_cuts import StageSeconds, least_bottleneck
from penstock.values.clusters import Cluster
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text

__all__ = ["is_unreplicated", "least_rank_bytes", "room_of", "sufficient_changes"]


def is_unreplicated(request: Request) -> bool:
    """Whether the plans of `request` have no replicas."""
    return request.straight or request.stages is not None or request.definition.layout.has_several


def room_of(request: Request, workers: int, size_bytes: float) -> Room:
    """The memory of one of `workers` ranks that run `request`."""
    return Room(
        size_bytes,
        request.schedule,
        request.microbatches,
        workers,
        request.vertical_sync,
        request.optimizer_copies,
    )


def least_rank_bytes(profile: Profile, devices: int, request: Request) -> float:
    """The bytes of the rank that needs most, in the plan of `request` that needs least; infinite if there is no plan.

    Exact, except where a rank holds several stages (`penstock.planning.pipedream.interleaving`).
    """
    costs = chain_costs(profile, recompute=request.recompute)
    if not is_unreplicated(request):
        return least_peak_bytes(costs, devices, room_of(request, devices, 0.0))
    stages = request.stage_count(devices)
    if stages > costs.layers:
        return inf
    ranks = stages // request.stages_per_rank
    free = [np.zeros(costs.layers + 1)] * (stages - 1)
    if request.definition.layout.has_several:
        counts = chunks_in_flight(ranks, request.stages_per_rank, request.microbatches, request.schedule)
        stage_ranks = request.definition.layout.ranks(stages, ranks)
        return cut_interleaved(
            costs, free, counts, 0.0, request.optimizer_copies, stage_ranks=stage_ranks, quick=True
        ).worst_bytes
    room = room_of(request, ranks, 0.0)
    return least_bottleneck(_stage_bytes(costs, room, ranks), free)


def sufficient_changes(profile: Profile, cluster: Cluster, request: Request) -> Iterator[Iterator[str | None]]:
    """The attempts of `nothing_fits`: single changes with which a plan of `request` fits on `cluster`."""
    devices, most = cluster.devices, profile.microbatch_size
    least = least_rank_bytes(profile, devices, request)
    if least < inf:
        yield iter([f"{bytes_text(least)} on each device"])

    def attempt(words: str, changed: Request, sized: Profile = profile, count: int = devices) -> str | None:
        return words if _fits(sized, count, changed, cluster.memory_bytes or inf) else None

    if not request.recompute:
        yield (attempt("recompute=True", replace(request, recompute=True)) for _ in range(1))
    schedule = request.definition
    if request.schedule != DEFAULT_SCHEDULE and not schedule.layout.has_several:
        other = replace(request, schedule=DEFAULT_SCHEDULE)
        yield (attempt(f"schedule={DEFAULT_SCHEDULE!r}", other) for _ in range(1))
    if request.vertical_sync and schedule.has_vertical_sync:
        yield (attempt("vertical_sync=False", replace(request, vertical_sync=False)) for _ in range(1))
    if schedule.flushes:
        ranks = request.stage_count(devices) // request.stages_per_rank
        counts = (count for count in halves(request.microbatches) if request.can_run(ranks, count))
        yield (attempt(f"microbatches={count}", replace(request, microbatches=count)) for count in counts)
    yield (attempt(f"microbatches of {size} samples", request, profile.scaled(size)) for size in halves(most))
    if request.stages is None:
        counts = (wide.devices for wide in wider_clusters(cluster))
        yield (attempt(f"{count} devices", request, profile, count) for count in counts)


def _fits(profile: Profile, devices: int, request: Request, size_bytes: float) -> bool:
    if is_unreplicated(request):
        return least_rank_bytes(profile, devices, request) <= size_bytes
    return fits_flat(chain_costs(profile, recompute=request.recompute), devices, room_of(request, devices, size_bytes))


def _stage_bytes(costs: ChainCosts, room: Room, ranks: int) -> StageSeconds:
    """The bytes that each stage of a pipeline without replicas needs, in the shape of its seconds."""
    stops = np.arange(costs.layers + 1)

    def held(stage: int, starts: Counts) -> Matrix:
        counts = room.counts(1, ranks - stage)
        return np.where(stops > starts[:, None], interval_bytes(costs, *counts, room.optimizer_copies, starts), np.inf)

    return held
