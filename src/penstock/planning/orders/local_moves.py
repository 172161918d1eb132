"""Local search: operations on the critical path change places with their neighbours on the same rank.

The critical path is a chain of blocks: what a rank does without a pause, from the operation that had to wait for a
message to the one whose message the next block waited for. A step gets shorter only if such a block changes: its last
operation moves forward, its first one back, or a weight part out of it. A move that makes the step longer is taken if
the step is still shorter than it was some moves ago (late acceptance), so that the search passes over small rises.

Stages move as well: a cut by some layers, and which of them recompute. That changes seconds and bytes at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import TypeAlias

from penstock.planning.orders.rows import WEIGHT, Op, OrderCosts, Row, TimedRows, time_rows
from penstock.values.plans import Plan

Move: TypeAlias = tuple[int, int, int]
"""(rank, from place, to place)"""

_MEMORY = 20
"""How many moves ago a step that is accepted may have been as long."""
_STEPS = 1, 2, 4
"""By how many layers a cut moves: behind one that sends less there may be some that send more."""
_LOOKED_AT = 40
"""How many operations behind the beginning of a block may move there."""


def improve(costs: OrderCosts, timed: TimedRows, tries: int, variant: int = 0) -> TimedRows:
    """The best rows that `tries` moves from `timed` lead to, within the limits; the same for the same `variant`."""
    draw, best, current = Random(variant), timed, timed
    before = [timed.score] * _MEMORY
    moves = list(find_moves(costs, current))
    for turn in range(tries):
        if not moves:
            break
        rank, start, stop = moves.pop(draw.randrange(len(moves)))
        row = list(current.rows[rank])
        row.insert(stop, row.pop(start))
        if not costs.fits(row, rank):
            continue
        rows = list(current.rows)
        rows[rank] = row
        tried = time_rows(costs, rows)
        if tried is None:
            continue
        if tried.score <= max(current.score, before[turn % _MEMORY]):
            current, moves = tried, list(find_moves(costs, tried))
            best = min(best, current, key=lambda each: each.score)
        before[turn % _MEMORY] = current.score
    return best


def find_moves(costs: OrderCosts, timed: TimedRows) -> Iterator[Move]:
    """The moves that can shorten the critical path."""
    for rank, first, last in _critical_blocks(costs, timed):
        row = timed.rows[rank]
        yield from ((rank, last, place) for place in _reachable(row, last, range(last - 1, first - 1, -1)))
        yield from ((rank, first, place) for place in _reachable(row, first, range(first + 1, last + 1)))
        yield from ((rank, place, place + 1) for place in range(first, last) if _may_swap(row[place], row[place + 1]))
        for place in range(first, last):
            if row[place][0] == WEIGHT:
                places = list(_reachable(row, place, range(place + 1, last + 1)))
                yield from ((rank, place, farthest) for farthest in places[-1:])
        behind = range(first + 1, min(len(row), first + _LOOKED_AT))
        able = [place for place in behind if first in _reachable(row, place, range(place - 1, first - 1, -1))]
        weights = [place for place in able if row[place][0] == WEIGHT]
        yield from ((rank, place, first) for place in {*able[:1], *weights[:1]})


def _critical_blocks(costs: OrderCosts, timed: TimedRows) -> Iterator[tuple[int, int, int]]:
    """(rank, first place, last place) of each block of the critical path, from the end of the step back."""
    places = {op: (rank, place) for rank, row in enumerate(timed.rows) for place, op in enumerate(row)}
    rank, last = timed.slowest, len(timed.rows[timed.slowest]) - 1
    while True:
        row, starts, first = timed.rows[rank], timed.starts[rank], last
        while first and _stop(costs, row[first - 1], starts[first - 1]) >= starts[first]:
            first -= 1
        yield rank, first, last
        source = costs.source(row[first]) if row[first][0] != WEIGHT else None
        if source is None:
            return
        rank, last = places[source[0]]


def _stop(costs: OrderCosts, op: Op, start: float) -> float:
    return start + costs.seconds[op[0]][op[1]]


def _reachable(row: Row, place: int, places: range) -> Iterator[int]:
    """The first of `places`, up to the last to which the operation at `place` can move past all before."""
    for other in places:
        if not _may_swap(row[place], row[other]):
            return
        yield other


def _may_swap(one: Op, other: Op) -> bool:
    """Whether two operations of a rank may change their order: microbatches ascend, and each goes through in turn."""
    return one[1] != other[1] or (one[0] != other[0] and one[2] != other[2])


@dataclass(frozen=True, slots=True)
class StageMoves:
    """Which moves a search may make: of cuts, and of recomputation."""

    cuts: bool = False
    recomputation: bool = False

    def of(self, plan: Plan) -> Iterator[Plan]:
        """The plans that are one move away from `plan`, which has no prediction."""
        for stage, (before, behind) in enumerate(pairwise(plan.stages) if self.cuts else ()):
            for cut in (before.stop + layers for step in _STEPS for layers in (-step, step)):
                if before.start < cut < behind.stop:
                    moved = replace(before, stop=cut), replace(behind, start=cut)
                    yield replace(plan, stages=(*plan.stages[:stage], *moved, *plan.stages[stage + 2 :]))
        if self.recomputation:
            changes = ({stage} for stage in range(len(plan.stages)))
            sets = [*(plan.recomputed ^ change for change in changes), range(len(plan.stages)), ()]
            yield from (replace(plan, recompute=tuple(again)) for again in sets if plan.recomputed != {*again})
