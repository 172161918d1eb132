"""Seeds: the rows from which a search for an order begins, of three kinds.

Named orders; list schedules by several rules; and, where the stages lie in a V, building blocks with the weight parts
of each put where a rank would wait. The best of each kind go on.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf

from penstock.planning.orders.list_orders import ListRule, delay_forwards, list_order, place_weights
from penstock.planning.orders.rows import (
    BACKWARD,
    FORWARD,
    ROUNDING,
    WEIGHT,
    Op,
    OrderCosts,
    Rows,
    TimedRows,
    rows_of,
    time_rows,
)
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.v_blocks import Turn, VBlock, find_blocks, squeeze

_WEIGHT_SHARES = (1.0, 0.7, 0.4, 0.0)
_FORWARD_SHARES = (1.0, 0.5, 0.0)
_DEPTHS = ((1.0, 0), (1.0, 1), (1.5, 0), (2.0, 0), (2.0, 1))
"""How many microbatches may be ahead on rank r of p: the first number times p - r, and the second more."""
_PASSES, _AGAIN = 3, 4
"""How often list schedules are made, and by how many rules in each pass behind the first."""
_QUICK = (ListRule(0.5), ListRule(0.0), ListRule(0.5, 0.5))
"""The rules of list schedules that are tried for each limit and each move of stages."""
_BLOCKS, _IMPROVED = 6, 3
"""The building blocks that are tried of each number in flight, and those whose weight parts are put anew."""
_LARGE = 4_000
"""Of rows with more operations than these, fewer seeds are made."""


def find_seeds(costs: OrderCosts, named: list[Schedule]) -> list[TimedRows]:
    """The seeds that keep within the limits, best first."""
    found: list[TimedRows] = []
    for schedule in named:
        rows = rows_of(schedule, costs.whole)
        timed = None if rows is None else time_rows(costs, rows)
        if timed is not None:
            found += _fitting(costs, timed)
            found += spread_weights(costs, timed)
    found += _listed(costs)
    found += _blocks(costs)
    distinct: dict[float, TimedRows] = {}
    for timed in found:
        distinct.setdefault(timed.score, timed)
    return sorted(distinct.values(), key=lambda timed: timed.score)


def _number(most: int, costs: OrderCosts) -> int:
    return max(2, round(most * min(1.0, _LARGE / costs.operations)))


def _fitting(costs: OrderCosts, timed: TimedRows) -> list[TimedRows]:
    return [timed] if all(costs.fits(row, rank) for rank, row in enumerate(timed.rows)) else []


def _listed(costs: OrderCosts) -> list[TimedRows]:
    depths = [costs.length - rank for rank in costs.ranks]
    aheads = [(), *(tuple(factor * depth + more for depth in depths) for factor, more in _DEPTHS)]
    # What is best with one choice of `ahead` may be worse than another when the rest is chosen.
    return [*_listed_by(costs, aheads), *_listed_by(costs, [_filled(costs)])]


def _listed_by(costs: OrderCosts, aheads: list[tuple[float, ...]]) -> list[TimedRows]:
    made: dict[ListRule, TimedRows | None] = {}

    def score(rule: ListRule) -> float:
        timed = made[rule] if rule in made else made.setdefault(rule, _list(costs, rule, {}))
        return inf if timed is None else timed.score

    # One choice after another is made best, since all together are too many.
    shares = _WEIGHT_SHARES if len(costs.whole) < costs.stages else (0.0,)
    best = min((ListRule(share, ahead=ahead) for share in shares[-1::-2] for ahead in aheads), key=score)
    best = min((replace(best, weight_share=share) for share in shares), key=score)
    best = min((replace(best, forward_share=share) for share in _FORWARD_SHARES), key=score)
    found = [(rule, timed) for rule, timed in made.items() if timed is not None]
    # The times of one pass are what the next one expects.
    for _ in range(_PASSES - 1):
        found.sort(key=lambda each: each[1].score)
        again = ((rule, _list(costs, rule, timed.arrivals(costs))) for rule, timed in found[: _number(_AGAIN, costs)])
        found += [(rule, timed) for rule, timed in again if timed is not None]
    return [timed for _, timed in found]


def _filled(costs: OrderCosts) -> tuple[float, ...]:
    """By stage: the forwards for which its rank has time until the first gradient comes: one more would delay it."""
    found, until = list[float](), 0.0
    for stage in reversed(range(costs.stages)):
        until += costs.forward[stage]
        own = sum(costs.forward[other] for other in costs.held[costs.ranks[stage]])
        found.append(max(1, until // own) if own else inf)
        until += costs.seconds[BACKWARD][stage] + (
            costs.activation[stage - 1] + costs.gradient[stage - 1] if stage else 0
        )
    return tuple(reversed(found))


def _list(costs: OrderCosts, rule: ListRule, expected: dict[Op, float]) -> TimedRows | None:
    rows = list_order(costs, rule, expected)
    return None if rows is None else time_rows(costs, rows)


def spread_weights(costs: OrderCosts, timed: TimedRows) -> Iterator[TimedRows]:
    """`timed` with its weight parts put anew, under several rules."""
    if len(costs.whole) == costs.stages:
        return
    for share in _WEIGHT_SHARES:
        rows = place_weights(costs, timed.rows, share, timed.arrivals(costs))
        found = None if rows is None else time_rows(costs, rows)
        if found is not None:
            yield found


def delay_rows(costs: OrderCosts, rows: Rows, *, overtakes: bool) -> Iterator[TimedRows]:
    """`rows` with forwards that wait until they fit, and weight parts put anew, under several rules."""
    expected: dict[Op, float] = {}
    for share in _WEIGHT_SHARES if len(costs.whole) < costs.stages else _WEIGHT_SHARES[:1]:
        delayed = delay_forwards(costs, rows, ListRule(share, overtakes=overtakes), expected)
        timed = None if delayed is None else time_rows(costs, delayed)
        if timed is not None:
            expected = timed.arrivals(costs)
            yield timed


def adapted_seeds(costs: OrderCosts, rows: Rows) -> Iterator[TimedRows]:
    """The few seeds that are tried for each of many `costs` like those that `rows` are good for."""
    timed = time_rows(costs, rows)
    fitting = [] if timed is None else _fitting(costs, timed)
    yield from fitting or delay_rows(costs, rows, overtakes=False)
    yield from quick_seeds(costs)


def quick_seeds(costs: OrderCosts) -> list[TimedRows]:
    """List schedules by a few rules."""
    made = (_list(costs, rule, {}) for rule in _QUICK)
    return [timed for timed in made if timed is not None]


def _blocks(costs: OrderCosts) -> Iterator[TimedRows]:
    length = costs.length
    if costs.stages != 2 * length or costs.ranks != costs.ranks[::-1] or len(costs.whole) == costs.stages:
        return
    saved = [sum(costs.saved[stage] for stage in held) / len(held) or inf for held in costs.held]
    most = min(2.0 * length, *(limit * ROUNDING / each for limit, each in zip(costs.limits, saved, strict=True)))
    # Two rounds of the ranks show which blocks are fast.
    short = replace(costs, microbatches=min(costs.microbatches, 2 * length))
    groups: dict[tuple[int, bool], list[VBlock]] = {}
    for block, in_flight in find_blocks(length):
        # A block with more in flight than fits may do with its weight parts put earlier, or squeezed.
        if in_flight <= most + 2:
            groups.setdefault((in_flight, block.switch is None), []).append(block)
    tries = [
        (block, squeezed)
        for (in_flight, equal), alike in groups.items()
        for squeezed in ([None] if equal else []) + ([int(most)] if in_flight >= most - 1 else [])
        for block in alike[: _number(_BLOCKS, costs)]
    ]
    timings = ((_time_block(short, *each), each) for each in tries)
    tried = sorted(((timed, each) for timed, each in timings if timed is not None), key=lambda pair: pair[0].score)
    for fits in (True, False):
        for each in [each for timed, each in tried if bool(_fitting(short, timed)) is fits][
            : _number(_IMPROVED, costs)
        ]:
            timed = _time_block(costs, *each)
            if timed is not None:
                yield from _fitting(costs, timed)
                yield from spread_weights(costs, timed)


def _time_block(costs: OrderCosts, block: VBlock, most: int | None) -> TimedRows | None:
    """`block`, or what squeezing it under `most` leaves, which is None if it does not fit."""
    length, count = costs.length, costs.microbatches
    plain = (tuple(block.row(length, rank, count)) for rank in range(length))
    turns = tuple(plain) if most is None else squeeze(block, length, count, most)
    timed = None if turns is None else time_rows(costs, _rows_of(costs, turns))
    return timed if most is None or timed is None or _fitting(costs, timed) else None


def _rows_of(costs: OrderCosts, turns: Iterable[Iterable[Turn]]) -> Rows:
    """`turns`: by rank, its operations in a V."""
    kinds = {"F": (FORWARD,), "I": (BACKWARD,), "W": (WEIGHT,), "B": (BACKWARD, WEIGHT)}
    return [
        [
            (kind, held[place], microbatch)
            for letter, place, microbatch in ops
            for kind in kinds[letter]
            if kind != WEIGHT or held[place] not in costs.whole
        ]
        for held, ops in zip(costs.held, turns, strict=True)
    ]
