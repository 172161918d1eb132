"""No order is faster than its lower bound, and of small pipelines the search finds the best order."""

from collections.abc import Iterator
from itertools import product

import pytest

from penstock.planning.orders.bounds import bound_of
from penstock.planning.orders.local_moves import find_moves, improve
from penstock.planning.orders.rows import BACKWARD, FORWARD, WEIGHT, OrderCosts, Row, time_rows
from penstock.planning.orders.seeds import find_seeds

TIMES = ((2.0, 2.0, 1.0), (1.0, 3.0, 2.0), (3.0, 1.0, 1.0))


def costs_of(p: int, m: int, limit: float, *, split: bool, barrier: bool = True) -> OrderCosts:
    forward, backward, weight = zip(*TIMES[:p], strict=True)
    stages = range(p)
    return OrderCosts(
        ranks=tuple(stages),
        microbatches=m,
        forward=forward,
        backward=backward,
        weight=weight,
        activation=(0.5,) * (p - 1),
        gradient=(0.25,) * (p - 1),
        saved=(1.0,) * p,
        limits=(limit,) * p,
        whole=frozenset(() if split else stages),
        barrier=barrier,
    )


def all_rows(costs: OrderCosts, rank: int) -> list[Row]:
    """Every order of the operations of a rank with one stage that keeps within its limit."""
    kinds = (FORWARD, BACKWARD) if costs.whole else (FORWARD, BACKWARD, WEIGHT)

    def go_on(row: Row, done: tuple[int, ...]) -> Iterator[Row]:
        if sum(done) == len(kinds) * costs.microbatches:
            yield row
        for kind in kinds:
            if done[kind] < (done[kind - 1] if kind else costs.microbatches):
                longer = [*row, (kind, rank, done[kind])]
                if costs.fits(longer, rank):
                    yield from go_on(longer, tuple(count + (kind == other) for other, count in enumerate(done)))

    return list(go_on([], (0,) * len(kinds)))


@pytest.mark.parametrize(("p", "m", "split"), [(2, 2, True), (2, 3, True), (2, 4, False), (3, 3, False)])
@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("barrier", [True, False])
def test_of_all_orders_none_beats_the_bound_or_the_search(
    p: int, m: int, split: bool, limit: int, barrier: bool
) -> None:
    costs = costs_of(p, m, limit, split=split, barrier=barrier)
    every = product(*(all_rows(costs, rank) for rank in range(p)))
    best = min(timed.seconds for rows in every if (timed := time_rows(costs, list(rows))) is not None)
    found = min(improve(costs, seed, 200).seconds for seed in find_seeds(costs, [])[:2])

    bound = bound_of(costs)
    assert bound.seconds <= best + 1e-9, bound
    assert best <= found <= best * 1.0001


def test_bounds_name_what_binds() -> None:
    """By hand: f, b, w = 2, 2, 1 and 1, 3, 2; messages take 0.5 and 0.25."""
    by_work = bound_of(costs_of(2, 8, 9, split=True))
    by_memory = bound_of(costs_of(2, 8, 1, split=True))
    by_link = bound_of(costs_of(2, 8, 9, split=True), link_seconds=(7.0,))

    # Rank 1 starts after 2.5, works 8 x 6, and its weight parts (16) hide what comes after its last input backward.
    assert (by_work.seconds, by_work.reason) == (2.5 + 48, "rank 1's work")
    # A microbatch keeps rank 0 for 2 + 0.5 + 1 + 3 + 0.25 + 2 + 1.
    assert (by_memory.seconds, by_memory.reason) == (8 * 9.75, "rank 0's memory")
    assert (by_link.seconds, by_link.reason) == (2 + 56, "the link from rank 0 to rank 1")
    assert by_work.gap(101) == 0.5
    assert by_work.gap(50.5) == 0


def test_moves_keep_what_must_stay_in_order() -> None:
    costs = costs_of(3, 4, 3, split=True)
    timed = find_seeds(costs, [])[-1]
    moves = list(find_moves(costs, timed))

    assert moves
    for rank, start, stop in moves:
        row = list(timed.rows[rank])
        row.insert(stop, row.pop(start))
        places = {op: place for place, op in enumerate(row)}
        for kind, stage, microbatch in row:
            place = places[kind, stage, microbatch]
            assert place > places.get((kind, stage, microbatch - 1), -1)
            assert place > places.get((kind - 1, stage, microbatch), -1)


def test_a_search_is_repeatable() -> None:
    costs = costs_of(3, 5, 2, split=True)
    seed = find_seeds(costs, [])[0]

    assert improve(costs, seed, 300).rows == improve(costs, seed, 300).rows
    assert improve(costs, seed, 300).score <= seed.score
