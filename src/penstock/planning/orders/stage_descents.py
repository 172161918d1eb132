"""Descents: cuts move by some layers and stages begin or end to recompute, as long as an adapted order gets faster.

If nothing fits, stages move until something does.
"""

from dataclasses import replace
from functools import partial
from math import inf
from operator import add, sub

from penstock.planning.orders.bounds import bound_of
from penstock.planning.orders.limited_search import LimitedSearch, Start, all_seeds, shortened, whole_score
from penstock.planning.orders.local_moves import StageMoves
from penstock.planning.orders.rows import OrderCosts
from penstock.planning.orders.seeds import adapted_seeds

_LEAST_MOVES = 3
"""Moves end when seeds for them have had the operations that were given, but not before there are 3."""
_SMALL = 200
"""Where orders have more operations than these, slow starts are left out."""


def descended(best: Start, moves: StageMoves, operations: int) -> Start:
    """The start that moves lead to from `best`, as long as they shorten the step."""
    left = max(_LEAST_MOVES, operations // shortened(best.costs).operations)
    found: Start | None = best
    while found is not None and left > 0:
        best, found = found, None
        for search, costs in _promising(best, moves)[:left]:
            left -= 1
            found = _start_near(search, best, costs)
            if found is not None:
                break
    return found or best


def _start_near(search: LimitedSearch, best: Start, costs: OrderCosts) -> Start | None:
    """The start from a seed like that of `best`; None if it does not fit or is not faster."""
    score = partial(whole_score, costs)
    seed = min(adapted_seeds(shortened(costs), best.seed.rows), key=score, default=None)
    # Rows do not know when the last stage has to recompute.
    late = max(0.0, best.judged.seconds - best.seed.seconds) if shortened(costs) is costs else 0.0
    if seed is None or score(seed) >= whole_score(best.costs, best.seed) + late:
        return None
    judged = search.stages.judge(search.stages.plan_of(costs, seed))
    faster = search.fits(judged) and judged.seconds < best.judged.seconds
    return Start(search, costs, seed, judged) if faster else None


def _promising(best: Start, moves: StageMoves) -> list[tuple[LimitedSearch, OrderCosts]]:
    """The searches one move away whose bound is below the step of `best`, the least bound first."""
    made: list[tuple[float, int, LimitedSearch, OrderCosts]] = []
    for search in map(best.search.with_plan, moves.of(best.search.stages.plan)):
        costs = _costs_like(search, best)
        if (least := bound_of(costs).seconds) < best.judged.seconds:
            made.append((least, len(made), search, costs))
    return [(search, costs) for *_, search, costs in sorted(made)]


def _costs_like(search: LimitedSearch, best: Start) -> OrderCosts:
    """The costs with the split backwards and in the memory of `best`, and in that of one microbatch at least."""
    room = map(add, best.costs.limits, best.search.stages.other_bytes)
    costs = search.stages.costs(best.costs.whole, tuple(map(sub, room, search.stages.other_bytes)))
    return replace(costs, limits=tuple(map(max, costs.limits, costs.least)))


def recomputed(search: LimitedSearch, best: Start, moves: StageMoves) -> list[Start]:
    """The starts where all stages recompute, with whole backwards and with split ones; of large orders, if faster.

    A weight part keeps all that was recomputed.
    """
    if not moves.recomputation or search.stages.plan.recompute is True or max(search.limits) == inf:
        return []
    again = search.with_plan(replace(search.stages.plan, recompute=True))
    costs, whole = _costs_like(again, best), frozenset(range(best.costs.stages))
    every = dict.fromkeys((whole, costs.whole))
    most = best.judged.seconds if search.operations > _SMALL else inf
    found = [start for each in every for start in again.starts(replace(costs, whole=each), all_seeds)]
    return [start for start in found if start.judged.seconds < most]


def anew(search: LimitedSearch, moves: StageMoves, *, delays: bool) -> list[Start]:
    """Starts for these stages, and for the same with all of them recomputing; for roomier ones if nothing fits.

    `delays`: a named order is delayed where no other start fits.
    """
    plan, asked = search.stages.plan, [search]
    if moves.recomputation and plan.recompute is not True:
        asked.append(search.with_plan(replace(plan, recompute=True)))
    starts = [start for each in asked for start in each.quick_start()]
    if delays and not starts:
        starts = [start for each in asked if _fullest(each) <= 1 for start in each.least_delayed()]
    other = None if starts else _roomier(search, moves)
    return starts if other is None else anew(other, moves, delays=delays)


def _roomier(search: LimitedSearch, moves: StageMoves) -> LimitedSearch | None:
    """The search for stages of which a microbatch takes a smaller share of the limits; None if no move leads there.

    Moves end when the share is at most 1.
    """
    best, share = search, _fullest(search)
    while best is search or share > 1:
        near = min(map(best.with_plan, moves.of(best.stages.plan)), key=_fullest, default=best)
        if _fullest(near) >= share:
            break
        best, share = near, _fullest(near)
    return None if best is search else best


def _fullest(search: LimitedSearch) -> float:
    """The largest share of its limit that a rank takes with one microbatch in flight."""
    costs = search.stages.costs(frozenset(), search.limits)
    every = zip(costs.least, search.stages.other_bytes, search.limits, strict=True)
    return max((own + other) / most for own, other, most in every)
