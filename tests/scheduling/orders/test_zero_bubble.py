"""Schedules whose backwards are in two parts: their tables, their promises, the time they take, and their laws."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Action, Backward, BackwardInput, BackwardWeight, Receive, Update
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.orders import v_half, v_min, zb_v
from penstock.scheduling.placements import Placement, StageLayout
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.verifier import verify, verify_programs
from penstock.scheduling.written_programs import define_by_programs
from penstock.simulating import simulate
from penstock.values import Cluster, LayerProfile, Plan, Profile, Stage
from support.broken_programs import change, complaint, promising

FOLDED = {"zb-v": zb_v, "v-half": v_half, "v-min": v_min}


def zero_bubble(method: str, ranks: int, microbatches: int) -> Schedule:
    return Schedule(method, ranks, microbatches, 2 if method in FOLDED else 1)


@pytest.mark.parametrize(
    ("made", "in_flight", "halves"),
    [
        (zero_bubble("zb-h1", 4, 9), (4, 4, 4, 4), (0, 2, 3, 4)),
        (zero_bubble("zb-h1", 4, 2), (2, 2, 2, 2), (0, 2, 2, 2)),
        (zero_bubble("zb-h1", 1, 3), (1,), (0,)),
        (Schedule.placed("zb-h1", Placement(((0, 1), (2,), (3,))), 9), (2, 4, 4), (0, 3, 4)),
        (Schedule.placed("zb-h1", Placement(((0, 1), (2,), (3,)), split=True), 9), (3, 3, 3), (0, 2, 3)),
        (zero_bubble("zb-v", 3, 7), (6, 5, 4, 3, 2, 1), (0, 2, 3, 2, 1, 1)),
        (zero_bubble("zb-v", 3, 2), (2, 2, 2, 2, 2, 1), (0, 1, 1, 0, 1, 1)),
        (zero_bubble("zb-v", 1, 3), (2, 1), (0, 0)),
        (zero_bubble("v-half", 3, 7), (3, 3, 3, 2, 2, 1), (0, 1, 1, 1, 1, 1)),
        (zero_bubble("v-half", 1, 3), (1, 1), (0, 1)),
        (zero_bubble("v-min", 4, 9), (3, 3, 3, 2, 2, 2, 1, 1), (0, 1, 1, 1, 1, 1, 1, 1)),
    ],
)
def test_what_is_held(made: Schedule, in_flight: tuple[int, ...], halves: tuple[int, ...]) -> None:
    """In flight means from a forward to the weight part; of these `halves` are past their input part."""
    verification = verify(made)

    assert verification.in_flight == made.guarantees.in_flight == in_flight
    assert verification.pending_weight_backwards == made.guarantees.pending_weight_backwards == halves


@pytest.mark.parametrize("ranks", range(1, 6))
def test_no_rank_holds_more_than_the_first_one_under_1f1b(ranks: int) -> None:
    for microbatches in range(1, 3 * ranks + 2):
        first = verify(Schedule("1f1b-flush", ranks, microbatches)).in_flight_of_rank[0]

        assert max(verify(zero_bubble("zb-h1", ranks, microbatches)).in_flight_of_rank) == first
        assert max(verify(zero_bubble("zb-v", ranks, microbatches)).in_flight_of_rank) == 2 * first


def play(made: Schedule, minibatches: int = 1, forward: float = 1.0, inputs: float = 1.0, weight: float = 1.0) -> float:
    """Seconds of equal stages, as the simulator has them."""
    layer = LayerProfile("", forward, inputs + weight, 0.0, 0.0, 1.0, weight_seconds=weight)
    profile = Profile((layer,) * made.stages, 1)
    instant = Cluster.uniform(made.ranks, float("inf"))
    return simulate(made, profile, instant, minibatches, split_seconds=0.0).seconds


PRINTED = (
    (8, 24, 18522, 18086, 9337, 601, 0.2431, 0.1585, 0.1083),
    (8, 32, 18513, 18086, 9331, 626, 0.1985, 0.1242, 0.0837),
    (8, 64, 18546, 18097, 9321, 762, 0.1240, 0.0674, 0.0444),
    (8, 24, 29718, 29444, 19927, 527, 0.2347, 0.1323, 0.0698),
    (8, 32, 29802, 29428, 19530, 577, 0.1898, 0.1045, 0.0559),
    (8, 64, 29935, 29621, 19388, 535, 0.1091, 0.0554, 0.0294),
    (16, 48, 11347, 11248, 8132, 377, 0.2552, 0.1397, 0.0672),
    (16, 64, 11307, 11254, 8101, 379, 0.2082, 0.1088, 0.0516),
    (16, 128, 11325, 11308, 8109, 378, 0.1251, 0.0576, 0.0266),
    (32, 96, 10419, 10207, 7715, 408, 0.2646, 0.1421, 0.0641),
    (32, 128, 10408, 10204, 7703, 408, 0.2168, 0.1106, 0.0490),
    (32, 256, 10402, 10248, 7698, 460, 0.1352, 0.0594, 0.0257),
)
"""p, m, the microseconds of a forward, an input backward, a weight backward and a message, and the bubbles of 1F1B, H1
and H2: printed in [ZeroBubble 2024] and by github.com/sail-sg/zero-bubble-pipeline-parallelism, f68d387, efficiency.py.
"""


def h2(ranks: int, microbatches: int) -> ScheduleDefinition:
    """ZB-H2: twice the forwards of 1F1B's warm-up, and as many weight backwards are left over on later ranks."""
    rows = []
    for rank in range(ranks):
        ahead, late, words = 2 * (ranks - 1 - rank), 2 * rank, list[str]()
        for turn in range(-ahead, microbatches + late):
            for letter, k in (("F", turn + ahead), ("I", turn), ("W", turn - late)):
                words += [f"{rank}{letter}{k}@0"] if 0 <= k < microbatches else []
        rows.append(" ".join([*words, f"{rank}U1<0"]))
    return define_by_programs("zb-h2", "\n".join(rows))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("row", PRINTED, ids=str)
def test_printed_bubbles(row: tuple[float, ...]) -> None:
    """As the authors count: parts of a backward take no longer than a whole one, and of H2 the longest rank counts."""
    p, m, (f, b, w, c) = int(row[0]), int(row[1]), row[2:6]
    profile = Profile((LayerProfile("", f, b + w, 0.0, 0.0, 1.0, weight_seconds=w),) * p, 1)
    cluster = Cluster.uniform(p, float("inf"), latency_seconds=c)
    bubbles = []
    for method in ("1f1b-flush", "zb-h1", h2(p, m)):
        spans = simulate(Schedule(method, p, m), profile, cluster, split_seconds=0.0).spans
        computed = [span for span in spans if set("FBIW") & set(span.action)]
        longest = max(span.stop_seconds for span in computed)
        if not isinstance(method, str):
            begun = [min(span.start_seconds for span in computed if span.rank == rank) for rank in range(p)]
            longest = max(span.stop_seconds - begun[span.rank] for span in computed)
        bubbles.append(round(1 - m * (f + b + w) / longest, 4))

    assert bubbles == list(row[6:])


seconds = st.integers(1, 6)
sizes = st.integers(1, 6), st.integers(1, 14)


@settings(max_examples=40, deadline=None)
@given(*sizes, seconds, seconds, seconds, st.integers(1, 3))
def test_time_of_zb_h1(p: int, m: int, forward: int, inputs: int, weight: int, steps: int) -> None:
    """Table 1 of the paper: (p - 1)(F + I - W) of the bubble are left. Longer weight parts take no more of it than all
    but (p - 1) F or (p - 1) I, which a stage waits for its first microbatch or for its first gradient.
    """
    seconds = play(zero_bubble("zb-h1", p, m), steps, forward, inputs, weight)
    work = m * (forward + inputs + weight)
    fits = weight <= min(forward, inputs)
    if m >= p and (fits or steps == 1):
        assert seconds == steps * (work + (p - 1) * max(forward + inputs - weight, forward, inputs))
    if m < p and fits:
        assert seconds == steps * ((m + p - 1) * (forward + inputs) + weight)
    assert seconds <= play(Schedule("1f1b-flush", p, m), steps, forward, inputs, weight)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8])
def test_time_and_memory_of_v_half_and_v_min(p: int) -> None:
    """With equal parts, for k stages' microbatches in flight on a rank: what the program of the authors of [V 2024]
    prints, and what it expects at best, 3p - 1 - 3k + max(3p, p - 1 + 2(1 + floor((k + 1) / 2))).
    """
    for method, count in (("v-half", (p + 2) // 2), ("v-min", (p + 4) // 3)):
        k = 2 * count
        best = 3 * p - 1 - 3 * k + max(3 * p, p - 1 + 2 * (1 + (k + 1) // 2))
        more = 4 if method == "v-min" and p % 3 == 2 else 0
        for m in (p, 2 * p + 1):
            made = zero_bubble(method, p, m)
            assert max(verify(made).in_flight_of_rank) == min(k, 2 * m)
            assert p < 3 or play(made) == 6 * m + best + more


@settings(max_examples=40, deadline=None)
@given(*sizes, st.integers(1, 3))
def test_time_of_zb_v(p: int, m: int, steps: int) -> None:
    """Equal parts: in a full pipe a step takes its work alone, and the ranks start and end p - 1 forwards apart."""
    seconds = play(zero_bubble("zb-v", p, m), steps)
    if m >= 2 * p - 1:
        assert seconds == steps * 6 * m + p - 1
    if m <= p:
        # No more of a pipe is full than under zb-h1 with stages twice as long.
        assert seconds == steps * play(zero_bubble("zb-h1", p, m), 1, 2, 2, 2)
    assert seconds <= play(zero_bubble("zb-h1", p, m), steps, 2, 2, 2)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["zb-h1", "zb-v"]), *sizes)
def test_a_weight_part_only_follows_what_waits_for_nothing(method: str, p: int, m: int) -> None:
    """Every stage has whole backwards or pairs of parts of all its microbatches, each before the update."""
    made = zero_bubble(method, p, m)
    for row in made.step(0):
        for stage in {action.stage for action in row}:
            own = [action for action in row if action.stage == stage]
            parts = {
                kind: [a.microbatch for a in own if isinstance(a, kind)] for kind in (BackwardInput, BackwardWeight)
            }
            whole = [a.microbatch for a in own if isinstance(a, Backward)]

            assert parts[BackwardInput] == parts[BackwardWeight]
            assert sorted(parts[BackwardInput] + whole) == list(range(m))
            assert isinstance(own[-1], Update)


@settings(max_examples=40, deadline=None)
@given(*sizes, st.booleans(), st.integers(1, 3))
def test_receives_of_zb_v_only_move_ahead(p: int, m: int, norms: bool, replicas: int) -> None:
    """Against the receives as lowering puts them, each directly before what uses it."""
    at = tuple(tuple(range(place * replicas, (place + 1) * replicas)) for place in range(p))
    made = Schedule.placed("zb-v", Placement((*at, *reversed(at))), m, norms=norms)
    method = made.definition
    unordered = replace(made, method=replace(method, layout=StageLayout.ROUND_ROBIN))
    for row, plain in zip(made.step(0), unordered.step(0), strict=True):
        assert sorted(map(str, row)) == sorted(map(str, plain))
        assert [a for a in row if not isinstance(a, Receive)] == [a for a in plain if not isinstance(a, Receive)]
        assert all(place <= places_of(plain)[receive] for receive, place in places_of(row).items())


def places_of(row: tuple[Action, ...]) -> dict[Action, int]:
    """The number of other actions that come before each receive."""
    others, places = 0, {}
    for action in row:
        if isinstance(action, Receive):
            places[action] = others
        else:
            others += 1
    return places  # type: ignore[return-value]


def test_zb_v_needs_its_receives_in_the_order_of_the_sends() -> None:
    made = zero_bubble("zb-v", 2, 3)
    method = made.definition
    unordered = replace(made, method=replace(method, layout=StageLayout.ROUND_ROBIN), replicated=made.placement)

    assert complaint(lambda: verify(unordered))[0] == (
        "schedule 'zb-v' violates an invariant: messages are received in the order in which they were sent, on each "
        "edge between two ranks"
    )


def test_input_parts_of_a_minibatch_wait_for_the_update_before() -> None:
    """Also where its version is old enough: what is not split makes gradients of weights in the input part."""
    split = promising(Schedule("pipedream", 2, 1), pending_weight_backwards=(1, 1), splits_backward=True)
    made = promising(split, versions=(3, 2), in_flight=(3, 2), in_flight_of_rank=(3, 2))
    programs = change(made, 3, "0B0@0 0U1<0 -> 0I0@0 0W0@0; 0R1<1 0B1@0 0U2<0 -> 0R1<1 0I1@0 0U1<0 0W1@0 0U2<0")

    with pytest.raises(ScheduleError):
        verify_programs(programs, made, 3)


def test_a_plan_goes_there_and_back() -> None:
    made = Plan.uniform(8, 4, "zb-v", 4, 2)

    assert made.stages == (Stage(0, 2, (0,)), Stage(2, 4, (1,)), Stage(4, 6, (1,)), Stage(6, 8, (0,)))
    assert (made.ranks, made.stages_per_rank) == (2, 2)
