"""Where fetches and releases of weights come to lie in the rows of streamed stages."""

import pytest

from penstock.scheduling.actions import Fetch, Reduce, Release, parse
from penstock.scheduling.definitions import Step
from penstock.scheduling.placements import Placement
from penstock.scheduling.residence import with_residence
from penstock.scheduling.schedules import Schedule, inference
from penstock.scheduling.verification.verifier import verify


def streaming(method: str, ranks: int, microbatches: int, per_rank: int = 1, places: int = 2) -> Schedule:
    every = frozenset(range(ranks * per_rank))
    return Schedule(method, ranks, microbatches, per_rank, recomputed=every, streamed=every, places=places)


def rows(schedule: Schedule) -> list[str]:
    verify(schedule)
    return str(schedule).splitlines()[1:]


def test_one_rank_fetches_a_visit_ahead_and_keeps_the_stages_at_the_turn() -> None:
    assert rows(streaming("breadth-first", 1, 2, 3)) == [
        "rank 0: 0G0 1G0 0F0@0 0F1@0 0Q0 2G0 1F0@0 1F1@0 2F0@0 2B0@0 2F1@0 2B1@0 2Q0 0G0 1C0@0 1B0@0 1C1@0 1B1@0 1Q0 "
        "0C0@0 0B0@0 0C1@0 0B1@0 0Q0 0U1<0 1U1<0 2U1<0"
    ]


def test_a_fetch_is_before_the_receives_of_the_visit_before() -> None:
    assert rows(streaming("breadth-first", 2, 1, 2)) == [
        "rank 0: 0G0 2G0 0F0@0 0S0>1 2R0<1 2F0@0 2S0>3 2R0<3 2B0@0 2S0>1 2Q0 0C0@0 0R0<1 0B0@0 0Q0 0U1<0 2U1<0",
        "rank 1: 1G0 3G0 1R0<0 1F0@0 1S0>2 3R0<2 3F0@0 3B0@0 3S0>2 3Q0 1C0@0 1R0<2 1B0@0 1S0>0 1Q0 1U1<0 3U1<0",
    ]


def test_with_one_place_nothing_is_fetched_ahead() -> None:
    assert rows(streaming("breadth-first", 1, 1, 2, places=1)) == [
        "rank 0: 0G0 0F0@0 0Q0 1G0 1F0@0 1B0@0 1Q0 0G0 0C0@0 0B0@0 0Q0 0U1<0 1U1<0"
    ]


def test_an_evaluation_fetches_each_stage_once() -> None:
    made = inference(2, 2, 3, streamed=frozenset(range(4)))

    assert rows(made)[0] == (
        "rank 0: 0G0 2G0 0F0@0 0S0>1 0F1@0 0S1>1 0F2@0 0S2>1 0Q0 2R0<1 2F0@0 2S0>3 2R1<1 2F1@0 2S1>3 2R2<1 2F2@0 "
        "2S2>3 2Q0"
    )


def test_an_order_that_visits_a_stage_for_each_microbatch_fetches_it_for_each() -> None:
    row = streaming("interleaved", 1, 2, 3).row(0, Step(0))

    assert [str(action) for action in row if isinstance(action, Fetch)] == [
        *("0G0", "1G0", "2G0", "0G0", "1G0", "2G0", "1G0", "0G0")
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Of 0 and 2, stage 0 is needed later: three places, visits of 0 1 2 3 2 1 0.
        ("0F0@0 1F0@0 2F0@0 3F0@0 2F1@0 1F1@0 0F1@0", "0G0 1G0 2G0 0Q0 3G0 3Q0 2Q0 0G0 1Q0 0Q0"),
        # A stage that is not streamed parts no visit.
        ("0F0@4 9F0@4 0F1@4 1F0@4", "0G4 1G4 0Q4 1Q4"),
        ("9F0@0 9B0@0", ""),
    ],
)
def test_what_is_needed_last_leaves(text: str, expected: str) -> None:
    made = with_residence([parse(word) for word in text.split()], frozenset(range(4)), 3)

    assert " ".join(str(action) for action in made if isinstance(action, Fetch | Release)) == expected


def test_replicas_sum_the_gradients_of_a_stage_before_these_leave() -> None:
    """A replica without a microbatch too, in the order of the others."""
    every = frozenset(range(4))
    placement = Placement(((0, 2), (1, 3)) * 2)
    made = Schedule.placed("breadth-first", placement, 1, recomputed=every, streamed=every, norms=True)

    assert rows(made)[1] == (
        "rank 1: 1G0 3G0 1R0<0 1F0@0 1S0>2 3R0<2 3F0@0 3B0@0 3S0>2 3A1 3Q0 1C0@0 1R0<2 1B0@0 1S0>0 1A1 1Q0 "
        "3N1>2 1N1<2 1N1>0 1N1<0 1N1>2 3N1<2 1U1<0 3U1<0"
    )
    for row in made.step(0):
        assert [action.stage for action in row if isinstance(action, Reduce)] in ([3, 1], [2, 0])
