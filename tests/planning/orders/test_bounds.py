"""No order is faster than its lower bound, and of small pipelines the search finds the best order."""

from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import pytest

from penstock.planning.orders.bounds import bound_of
from penstock.planning.orders.local_moves import find_moves, improve
from penstock.planning.orders.rows import ROUNDING, OrderCosts, TimedRows, time_rows
from penstock.planning.orders.seeds import find_seeds
from penstock.planning.orders.window_moves import rearrange
from support.every_order import all_rows

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


def best_of_all(costs: OrderCosts) -> TimedRows:
    every = product(*(all_rows(costs, rank) for rank in range(costs.length)))
    timings = (time_rows(costs, list(rows)) for rows in every)
    return min((timed for timed in timings if timed is not None), key=lambda timed: timed.seconds)


@pytest.mark.parametrize(("p", "m", "split"), [(2, 2, True), (2, 3, True), (2, 4, False), (3, 3, False)])
@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("barrier", [True, False])
def test_of_all_orders_none_beats_the_bound_or_the_search(
    p: int, m: int, split: bool, limit: int, barrier: bool
) -> None:
    costs = costs_of(p, m, limit, split=split, barrier=barrier)
    best = best_of_all(costs).seconds
    found = min(improve(costs, seed, 200).seconds for seed in find_seeds(costs, [])[:2])

    bound = bound_of(costs)
    assert bound.seconds <= best + 1e-9, bound
    assert best <= found <= best * 1.0001


@pytest.mark.parametrize("ranks", [(0, 1, 1, 0), (0, 1, 0, 1)])
def test_none_beats_the_bound_with_two_stages_on_a_rank(ranks: tuple[int, ...]) -> None:
    times = (1.0, 2.0, 1.0, 3.0), (2.0, 1.0, 2.0, 1.0), (1.0, 1.0, 0.5, 1.0)
    sent, saved = (0.5, 0.0, 0.25), (1.0, 0.5, 0.75, 1.0)
    costs = OrderCosts(ranks, 2, *times, sent, sent, saved, (2.0, 2.0), whole=frozenset(range(4)))

    assert bound_of(costs).seconds <= best_of_all(costs).seconds + 1e-9


def draw_costs(draw: Random) -> OrderCosts:
    """Uneven stages, limits and links, backwards that are split or not and free some bytes before their weight part."""
    p, count = draw.randint(1, 3), draw.randint(1, 5)
    ranks = draw.choice([tuple(range(p)), (*range(p), *reversed(range(p))), (*range(p), *range(p))])
    stages = range(len(ranks))
    forward, backward, weight, saved = (tuple(draw.choice([0.25, 1.0, 1.0, 3.0]) for _ in stages) for _ in range(4))
    activation, gradient = (tuple(draw.choice([0.0, 0.5, 4.0]) for _ in stages[1:]) for _ in range(2))
    occupied = tuple(tuple(each * draw.choice([0.0, 0.5, 1.0]) for each in late) for late in (activation, gradient))
    least = max(sum(saved[stage] for stage in stages if ranks[stage] == rank) for rank in range(p))
    return OrderCosts(
        ranks,
        count,
        forward,
        backward,
        weight,
        activation,
        gradient,
        saved,
        limits=tuple(least * draw.choice([1.0, 1.3, 2.0, 2.5, 9.0]) for _ in range(p)),
        freed=tuple(size * draw.choice([0.0, 0.3, 1.0]) for size in saved),
        occupied=occupied,
        whole=frozenset(stage for stage in stages if draw.random() < 0.3),
        barrier=draw.random() < 0.5,
    )


def test_no_order_that_is_found_beats_the_bound() -> None:
    draw, checked = Random(0), 0
    for _ in range(40):
        costs = draw_costs(draw)
        found = min((timed.seconds for timed in find_seeds(costs, [])), default=inf)
        assert bound_of(costs).seconds <= found * ROUNDING, costs
        checked += found < inf
    assert checked > 20


def test_no_bound_is_above_the_optimum_of_a_small_v() -> None:
    """Uneven stages whose memory binds: microbatches that wait for their place, on one stage or on both of a rank."""
    draw, near = Random(4), 0
    for _ in range(60):
        stages = range(4)
        forward, backward, weight = (tuple(float(draw.randint(1, 9)) for _ in stages) for _ in range(3))
        saved = tuple(float(draw.randint(2, 6)) for _ in stages)
        least = max(saved[0] + saved[3], saved[1] + saved[2])
        costs = OrderCosts(
            ranks=(0, 1, 1, 0),
            microbatches=draw.choice((2, 3)),
            forward=forward,
            backward=backward,
            weight=weight,
            activation=(1.0, 0.0, 1.0),
            gradient=(2.0, 0.0, 2.0),
            saved=saved,
            limits=tuple(float(least + draw.randint(0, 6)) for _ in range(2)),
            freed=draw.choice(((), tuple(size / 2 for size in saved))),
            whole=frozenset(draw.choice(((), (0,), (0, 3)))),
        )
        costs = costs if costs.microbatches == 2 else replace(costs, whole=frozenset(stages))
        best = min(rearrange(costs, seed, 0).seconds for seed in find_seeds(costs, [])[:1])
        bound = bound_of(costs)
        assert bound.seconds <= best * ROUNDING, (costs, bound)
        near += bound.seconds > 0.95 * best
    assert near > 20


@pytest.mark.parametrize(
    ("freed", "limit", "m", "optimum", "gap"),
    [(0, 20, 6, 529, 0.031), (6, 25, 6, 511, 0.032), (10, 20, 8, 645, 0), (10, 30, 8, 495, 0), (0, 30, 8, 529, 0.031)],
)
def test_the_bound_is_near_optima_where_memory_binds(freed: int, limit: int, m: int, optimum: int, gap: float) -> None:
    """Four equal stages, and optima that OR-Tools' CP-SAT proved. What is left behind full rounds waits for the ranks,
    and a place that a backward frees in part for more.
    """
    f, b, w, c, size = ((seconds,) * 4 for seconds in (18.0, 18.0, 9.0, 1.0, 10.0))
    costs = OrderCosts((0, 1, 2, 3), m, f, b, w, c[1:], c[1:], size, (float(limit),) * 4, (float(freed),) * 4)

    assert 0 <= bound_of(costs).gap(optimum) <= gap


@pytest.mark.parametrize(
    ("p", "m", "times", "h", "a", "bubble"),
    [
        (8, 24, (18522, 18086, 9337, 601), 2304, 24, 0.1585),
        (8, 32, (29802, 29428, 19530, 577), 4096, 32, 0.1045),
        (16, 48, (11347, 11248, 8132, 377), 5120, 40, 0.1397),
        (32, 96, (10419, 10207, 7715, 408), 6144, 48, 0.1421),
    ],
)
def test_in_the_memory_of_1f1b_zb_h1_is_the_best(
    p: int, m: int, times: tuple[float, ...], h: int, a: int, bubble: float
) -> None:
    """Times, bytes and bubbles of ZB-H1 and ZB-1p that sail-sg measured, one stage per rank: the bound equals them."""
    saved, freed = 34 * h + 5 * a * 1024, 2 * h + 5 * a * 1024
    f, b, w, c = ((seconds,) * p for seconds in times)
    costs = OrderCosts(
        tuple(range(p)), m, f, b, w, c[1:], c[1:], (saved,) * p, (p * saved,) * p, (freed,) * p, barrier=False
    )
    bound = bound_of(costs)

    assert round(1 - costs.work[0] / bound.seconds, 4) == bubble
    assert bound.reason == "rank 0's memory"


def test_bounds_name_what_binds() -> None:
    """By hand: f, b, w = 2, 2, 1 and 1, 3, 2; messages take 0.5 and 0.25."""
    by_work = bound_of(costs_of(2, 8, 9, split=True))
    by_memory = bound_of(costs_of(2, 8, 1, split=True))
    by_link = bound_of(replace(costs_of(2, 8, 9, split=True), occupied=((6.0,), (7.0,))))

    # Rank 1 starts after 2.5, works 8 x 6, and its weight parts (16) hide what comes after its last input backward.
    assert (by_work.seconds, by_work.reason) == (2.5 + 48, "rank 1's work")
    # A microbatch keeps rank 0 for 2 + 0.5 + 1 + 3 + 0.25 + 2 + 1.
    assert (by_memory.seconds, by_memory.reason) == (8 * 9.75, "rank 0's memory")
    # The first gradient leaves after 2 + 0.5 + 1 + 3, and behind the last one the backward of rank 0 takes 2 + 1.
    assert (by_link.seconds, by_link.reason) == (6.5 + 56 + 3, "the link from rank 1 to rank 0")
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
