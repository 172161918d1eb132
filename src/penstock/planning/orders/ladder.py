"""The ladder: lower limits under which orders and stages are sought as well, since more memory should not be slower.

The limits depend on the stages alone: what is found under one is found for every larger limit that a user gives, if
there is time for it.
"""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import ceil, inf
from operator import add

from penstock.planning.orders.judged_stages import JudgedStages
from penstock.planning.orders.limited_search import QUICK, LimitedSearch, Start, seconds_of
from penstock.planning.orders.local_moves import StageMoves
from penstock.planning.orders.rows import ROUNDING
from penstock.planning.orders.stage_descents import anew, descended, recomputed

_STEPS = (1.0, 1.06), (1.6, 1.12), (2.5, 1.25)
"""(Up to how many times what as many microbatches as ranks take, how far apart limits are): more gains little."""
_LOWER, _BELOW = 0.92, 9
"""Limits that are too low for one microbatch at a time, each in units of the next: other stages may do with them."""
_SEARCHED_OPERATIONS = 1_000
"""Orders are sought under one lower limit after another until they have had this number of operations."""
_MOVED_STAGES = 2_000, 20_000
"""Moves of stages end when seeds for them have this number of operations; under a lower limit, and under the last."""
_SELDOM, _DENSE = 3, 150
"""Under every third limit moves begin anew. Limits are left out where orders have more than 150 operations."""


def limits_of(stages: JudgedStages) -> tuple[float, ...]:
    """The limits of a rank's bytes under which orders are sought, ascending.

    On each rank one more microbatch fits from some limit on; of such limits that lie close together the last is
    taken, and the peaks of named schedules besides. Below them are some for stages that take less.
    """
    costs = stages.costs(frozenset(), (inf,) * len(stages.fixed_bytes))
    sizes = [[costs.saved[stage] for stage in held] for held in costs.held]
    fixed_bytes, other_bytes = (
        [size + more - sum(own) for size, more, own in zip(base, costs.least, sizes, strict=True)]
        for base in (stages.fixed_bytes, stages.other_bytes)
    )
    least = max(map(add, stages.fixed_bytes, costs.least))
    usual = max(fixed + costs.length * sum(own) for fixed, own in zip(fixed_bytes, sizes, strict=True))
    peaks = {max(each.peaks) for each in stages.named}
    found = set[float]()
    for base in (fixed_bytes, other_bytes):
        for fixed, own in zip(base, sizes, strict=True):
            most = len(own) * min(costs.microbatches, int(_STEPS[-1][0] * costs.length))
            found |= {fixed + number * sum(own) / len(own) for number in range(len(own), most + 1)}
    rungs = [least * _LOWER**step for step in range(_BELOW, 0, -1)]
    begun = 0.0
    for limit in sorted(limit for limit in {*found, least} if least <= limit <= _STEPS[-1][0] * usual):
        if limit > begun * next(step for most, step in _STEPS if limit <= most * usual):
            begun = limit
            rungs.append(limit)
        else:
            rungs[-1] = limit
    return tuple(sorted({*rungs, *peaks}))


def rungs_of(search: LimitedSearch, stages: JudgedStages) -> list[LimitedSearch]:
    """The searches for `stages` under each limit of their ladder below this one, and under this one, ascending."""
    least = min(search.limits)
    rungs = [rung for rung in limits_of(stages) if rung * ROUNDING < least] if len({*search.limits}) == 1 else []
    return [
        LimitedSearch(stages, limits) for limits in (*((rung,) * len(search.limits) for rung in rungs), search.limits)
    ]


def starts_below(given: LimitedSearch, every: Sequence[JudgedStages], known: float) -> list[Start]:
    """The orders of all these stages that a quick search finds under lower limits, each faster than those before
    and than what is `known`, the least bound first. It ends when no bound is below these seconds.
    """
    rungs = [rungs_of(given, stages)[:-1] for stages in every]
    waiting: list[tuple[float, int, int]] = []
    found: list[Start] = []
    left = _SEARCHED_OPERATIONS // given.operations

    def wait(place: int, depth: int) -> None:
        if rungs[place]:
            heappush(waiting, (every[place].bound(rungs[place][-1].limits).seconds, depth, place))

    for place in range(len(every)):
        wait(place, 0)
    while waiting and left and waiting[0][0] < known:
        _, depth, place = heappop(waiting)
        search = rungs[place].pop()
        for start in search.quick_start():
            for each in (start, *search.improved(start, QUICK)):
                # What is above its limit may be below that which was given.
                if each.judged.seconds < known and given.fits(each.judged):
                    known = each.judged.seconds
                    found.append(each)
        left -= 1
        wait(place, depth + 1)
    return found


def moved_starts(search: LimitedSearch, given: Sequence[Start], moves: StageMoves) -> list[Start]:
    """The best seeds of the stages that `moves` lead to under each limit up to this one. `given`: starts under it.

    Under each limit moves go on from the best of the limit before; under every third also from the stages that were
    given, and from these with all of them recomputing: one stage that does so may gain nothing.
    """
    found: list[Start] = []
    *lower, last = rungs_of(search, search.stages)
    apart = ceil(search.operations / _DENSE)
    for turn, rung in enumerate([*lower[apart - 1 :: apart], last]):
        is_last, tried = rung is last, list[Start]()
        if found:
            again = replace(rung, stages=found[-1].search.stages).quick_start()
            tried.append(min((found[-1].under(rung.limits), *again), key=seconds_of))
        if is_last and given:
            tried += [*given, *recomputed(search, given[0], moves)]
        elif is_last or turn % _SELDOM == 0 or not found:
            tried += anew(rung, moves, delays=is_last)
        reached = [descended(start, moves, _MOVED_STAGES[is_last]) for start in tried]
        found += [min(reached, key=seconds_of)] if reached else []
    return found
