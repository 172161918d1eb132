"""What would be needed where nothing fits in memory: the least that the worst rank takes, and what would make it fit.

Nothing is guessed: each change that the text names was tried, alone, with the same search that found no plan.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from math import inf
from typing import TypeAlias

import numpy as np

from penstock.planning.costs import ChainCosts, Counts, Matrix, chain_costs
from penstock.planning.memory import Room, chunks_in_flight, interval_bytes
from penstock.planning.pipedream.flat_machines import fits_flat, least_worst_bytes
from penstock.planning.pipedream.interleaving import deal_stages
from penstock.planning.pipedream.straight import StageSeconds, least_slowest
from penstock.planning.requests import Request
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text

__all__ = ["fitting_advice", "is_alone", "least_rank_bytes", "room_of"]

_MOST_DEVICES = 64
"""Beyond so many a search takes too long for an error message."""


def is_alone(request: Request) -> bool:
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

    Exact, but where a rank holds several stages (`penstock.planning.pipedream.interleaving`). Layers are those of
    `profile`, whole.
    """
    costs = chain_costs(profile, recompute=request.recompute)
    if not is_alone(request):
        return least_worst_bytes(costs, devices, room_of(request, devices, 0.0))
    stages = request.stage_count(devices)
    if stages > costs.layers:
        return inf
    ranks = stages // request.stages_per_rank
    free = [np.zeros(costs.layers + 1)] * (stages - 1)
    if request.definition.layout.has_several:
        counts = chunks_in_flight(ranks, request.stages_per_rank, request.microbatches, request.schedule)
        places = request.definition.layout.ranks(stages, ranks)
        return deal_stages(costs, free, counts, 0.0, request.optimizer_copies, places=places, quick=True).worst_bytes
    room = room_of(request, ranks, 0.0)
    return least_slowest(_stage_bytes(costs, room, ranks), free)


def fitting_advice(profile: Profile, devices: int, size_bytes: float, request: Request) -> str:
    """Sentences: what the smallest plan of `request` needs, and which single changes make one fit in `size_bytes`."""
    least = least_rank_bytes(profile, devices, request)
    if least == inf:
        needed = "no plan of that shape exists"
    else:
        needed = f"the rank that needs most takes {bytes_text(least)} at the least"
    mends = []
    for variants in _changes(profile, devices, request):
        fitting = (words for words, other, count, asked in variants if _fits(other, count, asked, size_bytes))
        mends += [*islice(fitting, 1)]
    if mends:
        return f"{needed}. It would fit with {', or with '.join(mends)}"
    largest = max(layer.parameter_bytes for layer in profile.layers)
    return (
        f"{needed}. No single change of recompute, schedule, microbatches or devices (up to {_MOST_DEVICES}) is "
        f"enough: combine them, give devices of {bytes_text(least)}, or split the layers (the largest has "
        f"{bytes_text(largest)} of weights, and {2 + request.optimizer_copies:g} times that with gradients and "
        "optimizer)"
    )


_Variant: TypeAlias = tuple[str, Profile, int, Request]
"""(Words, profile, devices, request)."""


def _changes(profile: Profile, devices: int, request: Request) -> Iterator[Iterator[_Variant]]:
    """For each thing that may be changed alone, its changes, the least one first."""
    if not request.recompute:
        yield iter([("recompute=True", profile, devices, replace(request, recompute=True))])
    schedule = request.definition
    if request.schedule != DEFAULT_SCHEDULE and not schedule.layout.has_several:
        other = replace(request, schedule=DEFAULT_SCHEDULE)
        yield iter([(f"schedule={DEFAULT_SCHEDULE!r}", profile, devices, other)])
    if request.vertical_sync and schedule.has_vertical_sync:
        yield iter([("vertical_sync=False", profile, devices, replace(request, vertical_sync=False))])
    if schedule.flushes:
        ranks = request.stage_count(devices) // request.stages_per_rank
        counts = (count for count in _halves(request.microbatches) if request.can_run(ranks, count))
        yield ((f"microbatches={count}", profile, devices, replace(request, microbatches=count)) for count in counts)
    most = profile.microbatch_size
    yield ((f"{size} instead of {most} samples", profile.scaled(size), devices, request) for size in _halves(most))
    if request.stages is None:
        counts = (count for count in (2 * devices, 4 * devices, 8 * devices) if count <= _MOST_DEVICES)
        yield ((f"{count} devices", profile, count, request) for count in counts)


def _fits(profile: Profile, devices: int, request: Request, size_bytes: float) -> bool:
    if is_alone(request):
        return least_rank_bytes(profile, devices, request) <= size_bytes
    return fits_flat(chain_costs(profile, recompute=request.recompute), devices, room_of(request, devices, size_bytes))


def _halves(number: int) -> Iterator[int]:
    """Half of `number`, half of that, down to 1."""
    while number > 1:
        number //= 2
        yield number


def _stage_bytes(costs: ChainCosts, room: Room, ranks: int) -> StageSeconds:
    """What each stage of a pipeline without replicas needs, in the form of its seconds."""
    stops = np.arange(costs.layers + 1)

    def held(stage: int, starts: Counts) -> Matrix:
        counts = room.counts(1, ranks - stage)
        return np.where(stops > starts[:, None], interval_bytes(costs, *counts, room.optimizer_copies, starts), np.inf)

    return held
