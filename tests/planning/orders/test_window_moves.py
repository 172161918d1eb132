"""Windows of a step: small steps become optimal, larger ones of uneven stages much shorter, and all stay lawful."""

from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest

from penstock.planning.orders.bounds import bound_of
from penstock.planning.orders.limited_search import moved_in_rounds
from penstock.planning.orders.local_moves import improve
from penstock.planning.orders.rows import BACKWARD, FORWARD, ROUNDING, WEIGHT, OrderCosts, TimedRows, time_rows
from penstock.planning.orders.seeds import find_seeds
from penstock.planning.orders.window_moves import rearrange
from support.every_order import all_rows

V = (0, 1, 1, 0)
SMALL = OrderCosts(
    ranks=V,
    microbatches=2,
    forward=(1.0, 5.0, 7.0, 3.0),
    backward=(8.0, 4.0, 2.0, 6.0),
    weight=(2.0, 1.0, 8.0, 3.0),
    activation=(1.0, 0.0, 1.0),
    gradient=(1.0, 0.0, 1.0),
    saved=(8.0, 10.0, 9.0, 10.0),
    limits=(30.0, 30.0),
)
"""24 operations, whose optimum an independent solver proved."""


def uneven(draw: Random, p: int, m: int, share: float) -> OrderCosts:
    """A V of stages of 1 to 20 s and 4 to 12 bytes, in a share of what `1f1b-flush` holds."""
    stages = range(2 * p)
    ranks = (*range(p), *reversed(range(p)))
    forward, backward, weight = (tuple(float(draw.randint(1, 20)) for _ in stages) for _ in range(3))
    late = tuple(0.0 if here == there else 2.0 for here, there in pairwise(ranks))
    saved = tuple(float(draw.randint(4, 12)) for _ in stages)
    peak = max(min(m, p - rank) * (saved[2 * rank] + saved[2 * rank + 1]) for rank in range(p))
    least = max(saved[rank] + saved[-1 - rank] for rank in range(p))
    limit = max(least, float(int(share * peak)))
    return OrderCosts(ranks, m, forward, backward, weight, late, late, saved, (limit,) * p)


def seed_of(costs: OrderCosts) -> TimedRows:
    return find_seeds(costs, [])[0]


def assert_lawful(costs: OrderCosts, timed: TimedRows) -> None:
    """Every operation once, in an order in which the ranks can go on, within the limits, with true seconds."""
    kinds = (FORWARD, BACKWARD, WEIGHT)
    ops = [op for row in timed.rows for op in row]
    every = set(product(kinds, range(costs.stages), range(costs.microbatches)))
    assert set(ops) == {op for op in every if op[0] != WEIGHT or op[1] not in costs.whole}
    assert len(ops) == costs.operations
    assert all(costs.fits(row, rank) for rank, row in enumerate(timed.rows))
    again = time_rows(costs, timed.rows)
    assert again is not None
    assert again.seconds == timed.seconds


def test_a_step_of_few_operations_becomes_optimal() -> None:
    """The local moves end at 74 s from every seed; the optimum is 67 s."""
    found = [rearrange(SMALL, seed, 0) for seed in find_seeds(SMALL, [])]

    assert {timed.seconds for timed in found} == {67.0}
    assert min(improve(SMALL, seed, 400).seconds for seed in find_seeds(SMALL, [])) == 74.0
    for timed in found:
        assert_lawful(SMALL, timed)


def test_a_forward_that_could_start_waits_for_another() -> None:
    """Without that the best is 189 s, as in every order in which no rank waits beside something that it can do."""
    costs = OrderCosts(
        ranks=V,
        microbatches=3,
        forward=(2.0, 2.0, 1.0, 5.0),
        backward=(12.0, 12.0, 1.0, 12.0),
        weight=(2.0, 12.0, 12.0, 5.0),
        activation=(0.0,) * 3,
        gradient=(0.0,) * 3,
        saved=(2.0, 1.0, 5.0, 2.0),
        limits=(6.0, 7.0),
        whole=frozenset(range(4)),
    )
    found = rearrange(costs, seed_of(costs), 0)

    assert found.seconds == 156.0, "the optimum that CP-SAT proved"
    assert_lawful(costs, found)


def test_no_order_of_a_small_v_is_faster() -> None:
    """Beside every order there is, where memory binds: also where a forward that could start has to wait."""
    draw, gained = Random(0), 0
    for _ in range(6):
        costs = replace(uneven(draw, 2, 2, draw.uniform(0.5, 0.8)), whole=frozenset(range(4)))
        every = product(*(all_rows(costs, rank) for rank in range(2)))
        best = min(timed.seconds for rows in every if (timed := time_rows(costs, list(rows))) is not None)
        seed = seed_of(costs)

        assert rearrange(costs, seed, 0).seconds == best, costs
        gained += seed.seconds > best
    assert gained


def test_all_orders_of_a_straight_step_whose_backwards_are_split() -> None:
    draw = Random(1)
    for _ in range(6):
        (forward, backward, weight), saved = (
            [tuple(float(draw.randint(1, 9)) for _ in range(2)) for _ in range(3)],
            (1.0, 1.0),
        )
        freed = tuple(draw.choice([0.0, 0.5]) for _ in range(2))
        limits = tuple(draw.choice([1.0, 1.5, 2.0]) for _ in range(2))
        costs = OrderCosts((0, 1), 3, forward, backward, weight, (1.0,), (2.0,), saved, limits, freed)
        every = product(*(all_rows(costs, rank) for rank in range(2)))
        best = min(timed.seconds for rows in every if (timed := time_rows(costs, list(rows))) is not None)

        assert rearrange(costs, seed_of(costs), 0).seconds == best, costs


def test_uneven_stages_in_a_v_become_faster_and_stay_lawful() -> None:
    draw, gains = Random(2), []
    for p, m in ((3, 4), (3, 5), (3, 6)):
        costs = uneven(draw, p, m, 0.6)
        seed = seed_of(costs)
        found = rearrange(costs, seed, 3_000)
        assert_lawful(costs, found)
        assert rearrange(costs, seed, 3_000).rows == found.rows, "the same rows for the same question"
        gains.append(1 - found.seconds / seed.seconds)
    assert min(gains) >= 0
    assert sum(gains) > 0.03


@pytest.mark.parametrize("barrier", [True, False])
def test_links_that_are_kept_and_ranks_that_go_on_alone(barrier: bool) -> None:
    """Where messages wait for each other, and where the longest span of a rank counts, nothing gets worse."""
    draw = Random(3)
    for _ in range(3):
        costs = replace(uneven(draw, 3, 4, 0.7), occupied=((6.0, 6.0, 0.0, 6.0, 6.0), (3.0, 3.0, 0.0, 3.0, 3.0)))
        costs = replace(costs, barrier=barrier, freed=tuple(size / 2 for size in costs.saved))
        seed = seed_of(costs)
        found = rearrange(costs, seed, 2_000)
        assert_lawful(costs, found)
        assert found.seconds <= seed.seconds * ROUNDING


def test_nothing_is_sought_where_the_bound_is_reached() -> None:
    costs = replace(SMALL, limits=(1e9, 1e9), forward=(1.0,) * 4, backward=(1.0,) * 4, weight=(1.0,) * 4)
    costs = replace(costs, microbatches=8, activation=(0.0,) * 3, gradient=(0.0,) * 3)
    seed = seed_of(costs)

    assert rearrange(costs, seed, 10**9) is seed


def test_moves_go_on_from_the_last_round_while_it_shortens_the_step() -> None:
    """From other draws in each round: of these steps one gets shorter in each, one in two, and one has its bound."""
    for seed, rounds in ((2, 4), (7, 3), (6, 0)):
        costs = uneven(Random(seed), 4, 6, 0.75)
        begun = seed_of(costs)
        scores = [begun.score, *(timed.score for timed in moved_in_rounds(costs, begun, 60, 1_500, 4))]
        shorter = [after < 0.999 * before for before, after in pairwise(scores)]
        assert len(shorter) == rounds
        assert all(shorter[:-1]), "a round that gains little is the last"
        assert scores[-1] <= 0.95 * scores[0] or not rounds


def test_a_backward_may_start_before_that_which_it_waits_for() -> None:
    """Stage 0 recomputes for 9 s while it waits, and keeps nothing: its backward of 11 s starts before stage 1's."""
    stages = {"forward": (9.0, 1.0), "backward": (11.0, 1.0), "weight": (1.0, 1.0), "saved": (0.0, 1.0)}
    costs = OrderCosts((0, 1), 20, activation=(0.5,), gradient=(-8.5,), limits=(1.0, 2.0), **stages)  # type: ignore[arg-type]
    timed = min(find_seeds(costs, []), key=lambda each: each.seconds)

    assert bound_of(costs).seconds <= rearrange(costs, timed, 500).seconds * ROUNDING <= timed.seconds * ROUNDING**2
