"""Crossings: where values stop, which ways they take, and what could go directly."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.values.crossings import Crossing, find_hops, find_stops, find_way

STARTS = (0, 2, 3, 6, 8)
"""Stages of layers 0-1, 2, 3-5, 6-7 and 8-."""


def test_stops_are_the_stages_of_maker_and_readers() -> None:
    assert find_stops(Crossing("x", 0, (1, 2, 4, 5, 9)), STARTS) == (0, 1, 2, 4)
    assert find_stops(Crossing("x", 4, (5,)), STARTS) == (2,)


def test_a_way_has_the_stages_between_unless_they_are_skipped() -> None:
    assert find_way((0, 1, 4), ()) == (0, 1, 2, 3, 4)
    assert find_way((0, 1, 4), [(1, 4)]) == (0, 1, 4)
    assert find_way((0, 3, 6), [(3, 6), (0, 6)]) == (0, 1, 2, 3, 6)
    assert find_way((2,), [(2, 4)]) == (2,)


def test_hops_add_the_bytes_of_what_could_pass_together() -> None:
    crossings = [Crossing("a", 0, (3, 8), 10.0), Crossing("b", 1, (5,), 1.0), Crossing("c", 2, (3, 6), 100.0)]

    assert find_hops(crossings, STARTS) == {(0, 2): 11.0, (2, 4): 10.0}


stops = st.lists(st.integers(0, 12), min_size=1, unique=True).map(sorted)


@given(stops, st.sets(st.tuples(st.integers(0, 12), st.integers(0, 12))))
def test_a_way_ascends_over_all_stops_by_neighbours_and_skips(at: list[int], skips: set[tuple[int, int]]) -> None:
    way = find_way(at, skips)

    assert (way[0], way[-1]) == (at[0], at[-1])
    assert set(at) <= set(way)
    for here, there in pairwise(way):
        assert there == here + 1 or ((here, there) in skips and (here, there) in pairwise(at))
