"""Seeds: the rows from which a search for an order begins, of three kinds.

Named orders; list schedules by several rules; and, where the stages lie in a V, building blocks with the weight parts
of each put where a rank would wait. The best of each kind go on.
"""

from collections.abc import Iterator
from itertools import product
from math import inf

from penstock.planning.orders.list_orders import ListRule, delay_forwards, list_order, place_weights
from penstock.planning.orders.rows import BACKWARD, FORWARD, WEIGHT, Op, OrderCosts, Rows, TimedRows, rows_of, time_rows
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.v_blocks import VBlock, find_blocks

_WEIGHT_SHARES = (1.0, 0.7, 0.4, 0.0)
_FORWARD_SHARES = (1.0, 0.5, 0.0)
_DEPTHS = ((1.0, 0), (1.0, 1), (1.5, 0), (2.0, 0), (2.0, 1))
"""How many microbatches may be ahead on rank r of p: the first number times p - r, and the second more."""
_PASSES = 3
_BLOCKS = 8
"""The building blocks whose weight parts are put anew."""


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


def _fitting(costs: OrderCosts, timed: TimedRows) -> list[TimedRows]:
    return [timed] if all(costs.fits(row, rank) for rank, row in enumerate(timed.rows)) else []


def _listed(costs: OrderCosts) -> list[TimedRows]:
    depths = [costs.length - rank for rank in costs.ranks]
    aheads = [(), *(tuple(factor * depth + more for depth in depths) for factor, more in _DEPTHS)]
    splits = len(costs.whole) < costs.stages
    rules = [ListRule(*rule) for rule in product(_WEIGHT_SHARES if splits else (0.0,), _FORWARD_SHARES, aheads)]
    found = [(rule, timed) for rule in rules if (timed := _list(costs, rule, {})) is not None]
    # The times of one pass are what the next one expects.
    for _ in range(_PASSES - 1):
        found.sort(key=lambda each: each[1].score)
        again = ((rule, _list(costs, rule, timed.arrivals(costs))) for rule, timed in found[: len(rules) // 4])
        found += [(rule, timed) for rule, timed in again if timed is not None]
    return [timed for _, timed in found]


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


def _blocks(costs: OrderCosts) -> Iterator[TimedRows]:
    length = costs.length
    if costs.stages != 2 * length or costs.ranks != costs.ranks[::-1] or len(costs.whole) == costs.stages:
        return
    # A block with more in flight than fits may do with its weight parts put earlier.
    saved = [sum(costs.saved[stage] for stage in held) / len(held) or inf for held in costs.held]
    most = max(limit / each for limit, each in zip(costs.limits, saved, strict=True)) + 2
    rows = (_rows_of_block(costs, block) for block, in_flight in find_blocks(length) if in_flight <= most)
    tried = [timed for each in rows if (timed := time_rows(costs, each)) is not None]
    tried.sort(key=lambda timed: timed.score)
    fitting = [timed for timed in tried if _fitting(costs, timed)]
    larger = [timed for timed in tried if not _fitting(costs, timed)]
    yield from fitting[:_BLOCKS]
    for timed in (*fitting[:_BLOCKS], *larger[:_BLOCKS]):
        yield from spread_weights(costs, timed)


def _rows_of_block(costs: OrderCosts, block: VBlock) -> Rows:
    kinds = {"F": FORWARD, "I": BACKWARD, "W": WEIGHT}
    rows = (
        ((kinds[letter], held[place], microbatch) for letter, place, microbatch in ops)
        for held, ops in (
            (held, block.row(costs.length, rank, costs.microbatches)) for rank, held in enumerate(costs.held)
        )
    )
    return [[op for op in row if op[0] != WEIGHT or op[1] not in costs.whole] for row in rows]
