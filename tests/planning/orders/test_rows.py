"""The rows of a search take as long as the simulator says, and are found by list scheduling as published."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planning.orders.list_orders import ListRule, list_order, place_weights
from penstock.planning.orders.rows import BACKWARD, FORWARD, WEIGHT, OrderCosts, rows_of, text_of_rows, time_rows
from penstock.planning.orders.seeds import find_seeds
from penstock.scheduling import Placement, Schedule, define_by_programs, verify
from penstock.scheduling.v_blocks import find_blocks, squeeze
from penstock.simulating import Costs, execute

Row = tuple[int, int, int, int, int, int, int, int, float, float]
MEASURED: tuple[Row, ...] = (
    (8, 24, 18522, 18086, 9337, 601, 2304, 24, 0.1585, 0.0433),
    (8, 32, 18513, 18086, 9331, 626, 2304, 24, 0.1242, 0.0039),
    (8, 24, 29718, 29444, 19927, 527, 4096, 32, 0.1323, 0.0029),
)
LONGEST: Row = (32, 96, 10419, 10207, 7715, 408, 6144, 48, 0.1421, 0.0038)
"""p, m, f, b, w and c in microseconds, h, a, and the bubbles of ZB-1p and ZB-2p: table of the measured settings of
github.com/sail-sg/zero-bubble-pipeline-parallelism, f68d387, efficiency.py."""


def measured(row: Row, times: float) -> OrderCosts:
    """One stage per rank, and memory for `times` p microbatches; activations are 34 h + 5 a s bytes a token, s = 1024,
    of which the input part frees 2 h + 5 a s.
    """
    p, m, f, b, w, c, h, a = row[:8]
    saved = 34 * h + 5 * a * 1024
    return OrderCosts(
        ranks=tuple(range(p)),
        microbatches=m,
        forward=(f,) * p,
        backward=(b,) * p,
        weight=(w,) * p,
        activation=(c,) * (p - 1),
        gradient=(c,) * (p - 1),
        saved=(saved,) * p,
        limits=(times * p * saved,) * p,
        freed=(2 * h + 5 * a * 1024,) * p,
        barrier=False,
    )


def unit(ranks: tuple[int, ...], microbatches: int, limit: float, *, whole: frozenset[int] = frozenset()) -> OrderCosts:
    """Every operation takes 1 and every microbatch 1 byte; messages take nothing."""
    each = (1.0,) * len(ranks)
    free = (0.0,) * (len(ranks) - 1)
    return OrderCosts(ranks, microbatches, each, each, each, free, free, each, (limit,) * (max(ranks) + 1), whole=whole)


@pytest.mark.parametrize("row", MEASURED)
@pytest.mark.parametrize("times", [1, 2])
def test_seeds_are_as_good_as_the_published_search(row: Row, times: int) -> None:
    costs = measured(row, times)
    best = find_seeds(costs, [])[0]

    bubble = 1 - max(costs.work) / best.seconds
    assert bubble <= row[7 + times] + (0.00005 if times == 1 else 0.005)
    assert all(costs.fits(row, rank) for rank, row in enumerate(best.rows))


@pytest.mark.parametrize(("times", "bubble"), [(0.625, 0.3462), (0.75, 0.2536), (1.5, 0.0476)])
def test_each_way_to_run_ahead_has_the_rest_of_its_rule_chosen(times: float, bubble: float) -> None:
    """Up to 0.75 no rank should fill its time until the first gradient comes; at 1.5 each should."""
    costs = measured(MEASURED[2], times)

    assert 1 - max(costs.work) / find_seeds(costs, [])[0].seconds <= bubble


@pytest.mark.slow
@pytest.mark.parametrize("m", [96, 112])
def test_no_forward_delays_the_first_gradient_through_32_ranks(m: int) -> None:
    """One forward more than there is time for on the last rank but one takes 0.003 of a step of 96 microbatches."""
    costs = replace(measured(LONGEST, 2), microbatches=m)

    assert 1 - max(costs.work) / find_seeds(costs, [])[0].seconds <= LONGEST[9]


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8), (8, 16)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b-flush", "zb-h1", "zb-v"])
def test_time_of_rows_is_that_of_the_simulator(name: str, p: int, m: int) -> None:
    made = Schedule(name, p, m, 2 if name == "zb-v" else 1)
    ranks = tuple(made.rank_of(stage) for stage in range(made.stages))
    costs = unit(ranks, m, 1e9, whole=frozenset(() if made.guarantees.splits else ranks))
    rows = rows_of(made, costs.whole)
    assert rows is not None
    timed = time_rows(costs, rows)

    simulated = execute(made.step(0), made.placement, Costs.unit(made.stages, split=True))
    assert timed is not None and timed.seconds == simulated.seconds
    text = define_by_programs("again", text_of_rows(costs, rows, repeats=False))
    placed = made.placement if name == "zb-v" else None
    again = Schedule.placed(text, placed or Placement.straight(p), m)
    assert verify(again).in_flight == again.guarantees.in_flight


def test_zb_v_has_no_bubble_where_no_rank_waits_for_the_others() -> None:
    made = Schedule("zb-v", 4, 8, 2)
    costs = replace(unit((0, 1, 2, 3, 3, 2, 1, 0), 8, 8), barrier=False)
    rows = rows_of(made, costs.whole)
    assert rows is not None

    timed = time_rows(costs, rows)
    assert timed is not None and timed.seconds == 48 and costs.peak(rows[0]) == 8
    assert rows_of(made, frozenset(range(8))) is None, "its weight backwards of other stages come later"


def test_ranks_that_wait_for_each_other_have_no_time() -> None:
    costs = unit((0, 1), 1, 9)
    rows = rows_of(Schedule("gpipe", 2, 1), costs.whole)
    assert rows is not None

    assert time_rows(costs, [rows[0][1:] + rows[0][:1], rows[1]]) is None


times_of_stage = st.tuples(*[st.integers(1, 9)] * 3)


@given(
    stages=st.lists(times_of_stage, min_size=2, max_size=4),
    microbatches=st.integers(1, 5),
    limit=st.integers(1, 4),
    shares=st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0])),
    folded=st.booleans(),
    whole=st.booleans(),
    recomputed=st.integers(0, 3),
)
def test_list_orders_are_whole_and_fit(
    stages: list[tuple[int, int, int]],
    microbatches: int,
    limit: int,
    shares: tuple[float, float],
    folded: bool,
    whole: bool,
    recomputed: int,
) -> None:
    """Every operation once, in an order that runs, within the limit, also with what backwards recompute; weight parts
    move without the others.
    """
    count = len(stages) - len(stages) % 2 if folded else len(stages)
    ranks = tuple(min(s, count - 1 - s) for s in range(count)) if folded else tuple(range(count))
    limit += folded + recomputed
    costs = unit(ranks, microbatches, limit, whole=frozenset(range(count) if whole else ()))
    forward, backward, weight = zip(*stages[:count], strict=True)
    costs = replace(costs, forward=forward, backward=backward, weight=weight, freed=(-float(recomputed),) * count)
    rows = list_order(costs, ListRule(*shares), {})
    assert rows is not None
    timed = time_rows(costs, rows)
    assert timed is not None
    again = place_weights(costs, rows, shares[0], timed.arrivals(costs))

    kinds = range(2 if whole else 3)
    for found in (rows, again):
        assert found is not None and time_rows(costs, found) is not None
        for rank, row in enumerate(found):
            assert costs.peak(row) <= limit
            held = [stage for stage in range(count) if ranks[stage] == rank]
            assert sorted(row) == [(kind, stage, k) for kind in kinds for stage in held for k in range(microbatches)]
    assert again is not None
    for row, other in zip(rows, again, strict=True):
        assert [op for op in row if op[0] != WEIGHT] == [op for op in other if op[0] != WEIGHT]


@pytest.mark.parametrize("p", [2, 4, 8])
def test_building_blocks_keep_what_they_say(p: int) -> None:
    """The least block of p ranks, and the most that any of its ranks has in flight over many microbatches."""
    for block, in_flight in find_blocks(p)[:20]:
        for rank in range(p):
            held = most = 0
            for letter, _, _ in block.row(p, rank, 12 * p):
                held += {"F": 1, "I": 0, "W": -1}[letter]
                most = max(most, held)
            assert most <= in_flight


@pytest.mark.parametrize("p", [3, 4, 5])
def test_squeezed_blocks_keep_what_they_say(p: int) -> None:
    """With offsets that change behind a rank, too: everything once, and at most what the block has in flight."""
    squeezed = [(squeeze(block, p, 6, most), most) for block, most in find_blocks(p)[:40]]

    assert squeeze(find_blocks(p)[0][0], p, 6, 1) is None, "a microbatch is in flight on both stages of the last rank"
    for turns, most in squeezed:
        for row in turns or ():
            held = 0
            for letter, _, _ in row:
                held += {"F": 1, "I": 0, "W": -1, "B": -1}[letter]
                assert held <= most
            assert len({turn for turn in row if turn[0] in "FIB"}) == 24
    assert any(
        turns is not None and block.switch for (turns, _), (block, _) in zip(squeezed, find_blocks(p)[:40], strict=True)
    )


@pytest.mark.parametrize(("p", "m", "in_flight", "seconds"), [(4, 8, 4, 59), (4, 8, 6, 53), (8, 16, 8, 119)])
def test_seeds_reach_the_frontier_of_building_blocks(p: int, m: int, in_flight: int, seconds: int) -> None:
    """Steps of 6 m + 3p - 1 - 3k + max(3p, p - 1 + 2 (1 + floor((k + 1) / 2))) [V 2024]."""
    ranks = (*range(p), *reversed(range(p)))
    costs = replace(unit(ranks, m, in_flight), barrier=False)

    assert find_seeds(costs, [Schedule("v-half", p, m, 2)])[0].seconds == seconds


def test_messages_of_a_stage_wait_for_one_another() -> None:
    """Forwards of 1 s, and messages that keep their link for 4 s, and 5 s on the way back: they arrive as far apart."""
    costs = replace(unit((0, 1), 3, 3), activation=(4.0,), gradient=(5.0,), occupied=((4.0,), (5.0,)))
    costs = replace(costs, whole=frozenset({0, 1}))
    rows = list_order(costs, ListRule(), {})
    timed = None if rows is None else time_rows(costs, rows)

    assert timed is not None
    assert [start for op, start in zip(timed.rows[1], timed.starts[1], strict=True) if op[0] == 0] == [5, 9, 13]
    assert [start for op, start in zip(timed.rows[0], timed.starts[0], strict=True) if op[0] == 1] == [13, 18, 23]


def test_a_backward_keeps_what_it_recomputes_until_its_weight_part() -> None:
    """Two microbatches of 1 byte; a backward adds 3 bytes, whole or split."""
    costs = replace(unit((0,), 2, 9.0), freed=(-3.0,))
    forwards = [(FORWARD, 0, 0), (FORWARD, 0, 1)]
    late = [(BACKWARD, 0, 0), (BACKWARD, 0, 1), (WEIGHT, 0, 0), (WEIGHT, 0, 1)]

    assert costs.peak([*forwards, *late]) == 8.0
    assert costs.peak([*forwards, *late[::2], *late[1::2]]) == 5.0
    assert replace(costs, whole=frozenset({0})).peak([*forwards, *late[:2]]) == 5.0
