"""The orders of the methods: their tables, their promises, and the time they take."""

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduling.actions import Action, Backward, BackwardInput, BackwardWeight, Forward, Receive, Send, Update
from penstock.scheduling.orders import (
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b_flush,
    pipedream,
    spp,
    two_bw,
)
from penstock.scheduling.schedules import Programs, Schedule, inference
from penstock.scheduling.verification.verifier import verify
from support.drawn_programs import drawn_table, run_clock, short, with_stage
from support.schedule_strategies import schedules


def makespan(programs: Programs, forward: Fraction, backward: Fraction) -> Fraction:
    starts = run_clock(programs, forward, backward)
    return max(
        start + (forward if isinstance(a, Forward) else backward if isinstance(a, Backward) else 0)
        for row in starts
        for a, start in row
    )


def draw_ticks(schedule: Schedule, word: Callable[[Action], str], wait: str) -> list[str]:
    """One step on the clock, a column per tick."""
    lines = []
    for rank, row in enumerate(run_clock(schedule.step(0))):
        words, tick = [f"rank {rank}"], 0
        for action, start in row:
            words += [wait] * (int(start) - tick) + [word(action)]
            tick = int(start) + (not isinstance(action, Update))
        lines.append(" ".join(words))
    return lines


def draw_parts(parts: list[Programs], word: Callable[[Action], str]) -> list[str]:
    """Parts side by side, a bar between them."""
    rows = zip(*parts, strict=True)
    return [
        f"rank {rank} " + " | ".join(" ".join(filter(None, map(word, piece))) for piece in row).strip()
        for rank, row in enumerate(rows)
    ]


def with_version(action: Action) -> str:
    return f"{short(action)}({action.version})" if isinstance(action, Forward | Backward) else ""


def test_gpipe_table() -> None:
    table = [
        "rank 0 F0 F1 F2 .. .. .. .. B0 B1 B2 U1",
        "rank 1 .. F0 F1 F2 .. .. B0 B1 B2 U1",
        "rank 2 .. .. F0 F1 F2 B0 B1 B2 U1",
    ]

    assert draw_ticks(Schedule("gpipe", 3, 3), short, "..") == table
    assert drawn_table(gpipe) == table


def test_one_f_one_b_flush_table() -> None:
    table = [
        "rank 0 F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3 U1",
        "rank 1 .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 U1",
        "rank 2 .. .. F0 B0 F1 B1 F2 B2 F3 B3 U1",
    ]

    assert draw_ticks(Schedule("1f1b-flush", 3, 4), short, "..") == table
    assert drawn_table(one_f_one_b_flush) == table


def test_interleaved_table() -> None:
    table = [
        "rank 0 0F0 0F1 2F0 2F1 ... 2B0 ... 2B1 0B0 0B1 0U1 2U1",
        "rank 1 ... 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 1U1 3U1",
    ]

    assert draw_ticks(Schedule("interleaved", 2, 2, 2), with_stage, "...") == table
    assert drawn_table(interleaved) == table


def test_forward_only_table() -> None:
    table = ["rank 0 0F0 0F1 2F0 2F1 0F2 ... 2F2", "rank 1 ... 1F0 1F1 3F0 3F1 1F2 ... 3F2"]

    assert draw_ticks(inference(2, 2, 3), with_stage, "...") == table
    assert drawn_table(forward_only) == table


def test_pipedream_table() -> None:
    schedule = Schedule("pipedream", 3, 1)
    steps = tuple(tuple(a for t in range(4) for a in schedule.step(t)[rank]) for rank in range(3))
    table = [
        "rank 0 F0(0) F1(0) F2(0) B0(0) F3(1) B1(0) | B2(0) B3(1)",
        "rank 1 F0(0) F1(0) B0(0) F2(1) B1(0) F3(2) B2(1) | B3(2)",
        "rank 2 F0(0) B0(0) F1(1) B1(1) F2(2) B2(2) F3(3) B3(3) |",
    ]

    assert draw_parts([steps, schedule.drain(4)], with_version) == table
    assert drawn_table(pipedream) == table
    # Four microbatches in one step are the same program.
    assert Schedule("pipedream", 3, 4).program(1) == schedule.program(4)


def test_two_bw_table() -> None:
    schedule = Schedule("2bw", 3, 3)
    table = [
        "rank 0 F0 F1 F2 B0 | F3 B1 F4 B2 U1 F5 B3 | B4 B5 U2",
        "rank 1 F0 F1 B0 F2 B1 | F3 B2 U1 F4 B3 F5 B4 | B5 U2",
        "rank 2 F0 B0 F1 B1 F2 B2 U1 | F3 B3 F4 B4 F5 B5 U2 |",
    ]

    assert draw_parts([schedule.step(0), schedule.step(1), schedule.drain(2)], short) == table
    waiting = Schedule("2bw", 3, 3, norms=True)
    late = [
        "rank 0 F3 B1 F4 B2 F5 B3 | U1 F6 B4 F7 B5 F8 B6 | B7 B8 U2 U3",
        "rank 1 F3 B2 F4 B3 F5 B4 | U1 F6 B5 F7 B6 F8 B7 | B8 U2 U3",
        "rank 2 F3 B3 F4 B4 F5 B5 | U1 F6 B6 F7 B7 F8 B8 | U2 U3",
    ]

    assert draw_parts([waiting.step(1), waiting.step(2), waiting.drain(3)], short) == late
    assert drawn_table(two_bw) == table + late


def test_spp_table() -> None:
    """INFOCOM 2022, figure 4: two stages, six microbatches."""
    table = [
        "rank 0 F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 .. B4 .. B5 U1",
        "rank 1 .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 U1",
    ]

    assert draw_ticks(Schedule("spp", 2, 6), short, "..") == table
    assert drawn_table(spp) == table


@pytest.mark.parametrize(
    ("stages", "microbatches", "in_flight"),
    [(4, 32, (13, 9, 5, 1)), (8, 32, (29, 25, 21, 17, 13, 9, 5, 1)), (3, 6, (6, 5, 1))],
)
def test_spp_in_flight(stages: int, microbatches: int, in_flight: tuple[int, ...]) -> None:
    """Specs of SPP, pitfall 9."""
    assert verify(Schedule("spp", stages, microbatches)).in_flight == in_flight


@pytest.mark.parametrize(("vertical_sync", "versions"), [(False, [1, 2, 3, 4]), (True, [1, 1, 1, 1])])
def test_versions_of_the_fifth_input_on_four_stages(vertical_sync: bool, versions: list[int]) -> None:
    """Specs section 2.4: input 5 (from 1) reads the weights made by inputs 1, 2, 3 and 4 on stages 0 to 3."""
    programs = Schedule("pipedream", 4, 1, vertical_sync=vertical_sync).program(5)

    assert [a.version for row in programs for a in row if isinstance(a, Forward) and a.microbatch == 4] == versions
    assert [a.version for row in programs for a in row if isinstance(a, Backward) and a.microbatch == 4] == versions


def test_first_minibatches_of_two_bw_read_the_first_weights() -> None:
    """Specs section 3.1: minibatches 1 and 2 read version 0, minibatch i >= 2 version i - 2, on every stage."""
    for row in Schedule("2bw", 4, 4).program(5):
        for action in row:
            match action:
                case Forward(microbatch=k, version=version) | Backward(microbatch=k, version=version):
                    assert version == [0, 0, 1, 2, 3][k // 4]
                case Update(version=version, gradient_version=gradient_version):
                    assert gradient_version == [0, 0, 1, 2, 3][version - 1]
                case _:
                    pass


def every_schedule(most_ranks: int, most_microbatches: int, most_stages: int):
    for ranks in range(1, most_ranks + 1):
        for microbatches in range(1, most_microbatches + 1):
            yield Schedule("gpipe", ranks, microbatches)
            yield Schedule("1f1b-flush", ranks, microbatches)
            yield Schedule("spp", ranks, microbatches)
            yield Schedule("zb-h1", ranks, microbatches)
            yield from (Schedule(name, ranks, microbatches, 2) for name in ("zb-v", "v-half", "v-min"))
            yield Schedule("pipedream", ranks, microbatches)
            yield Schedule("pipedream", ranks, microbatches, vertical_sync=True)
            if microbatches >= ranks:
                yield Schedule("2bw", ranks, microbatches)
            if microbatches % ranks == 0:
                for stages_per_rank in range(1, most_stages + 1):
                    yield Schedule("interleaved", ranks, microbatches, stages_per_rank)


@pytest.mark.slow
def test_every_small_schedule_keeps_the_laws_and_reaches_its_promise() -> None:
    for schedule in every_schedule(6, 12, 3):
        verification = verify(schedule)

        assert verification.in_flight == schedule.guarantees.in_flight, schedule
        assert verification.versions == schedule.guarantees.versions, schedule
        assert verification.pending_weight_backwards == schedule.guarantees.pending_weight_backwards, schedule


def test_every_small_inference_keeps_the_laws() -> None:
    for ranks in range(1, 6):
        for stages_per_rank in range(1, 4):
            for microbatches in range(1, 9):
                assert (
                    verify(inference(ranks, stages_per_rank, microbatches), 2).in_flight
                    == (0,) * ranks * stages_per_rank
                )


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(schedules(8, 16), st.integers(1, 4))
def test_random_schedules_keep_the_laws(schedule: Schedule, minibatches: int) -> None:
    verification = verify(schedule, minibatches)

    assert verification.actions == sum(map(len, schedule.program(minibatches)))


def test_in_flight_in_closed_form() -> None:
    assert Schedule("gpipe", 4, 9).guarantees.in_flight == (9, 9, 9, 9)
    assert Schedule("1f1b-flush", 4, 9).guarantees.in_flight == (4, 3, 2, 1)
    assert Schedule("1f1b-flush", 4, 2).guarantees.in_flight == (2, 2, 2, 1)
    assert Schedule("pipedream", 4, 1).guarantees.in_flight == (4, 3, 2, 1)
    assert Schedule("2bw", 4, 4).guarantees.in_flight == (4, 3, 2, 1)
    assert Schedule("pipedream", 4, 1).guarantees.versions == (4, 3, 2, 1)
    assert Schedule("pipedream", 4, 1, vertical_sync=True).guarantees.versions == (4, 4, 4, 4)
    assert Schedule("2bw", 4, 4).guarantees.versions == (2, 2, 2, 2)
    assert Schedule("interleaved", 4, 8, 2).guarantees.versions == (1,) * 8


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("stages_per_rank", [2, 3, 4])
def test_the_first_rank_of_an_interleaved_pipeline(ranks: int, stages_per_rank: int) -> None:
    """Specs section 4.2: 2(p - 1) + (v - 1)p + 1 activations, more than the p of a table in the paper."""
    verification = verify(Schedule("interleaved", ranks, 4 * ranks, stages_per_rank), 1)

    assert verification.in_flight_of_rank[0] == 2 * (ranks - 1) + (stages_per_rank - 1) * ranks + 1


@pytest.mark.parametrize("method", ["gpipe", "1f1b-flush"])
def test_time_of_a_flush(method: str) -> None:
    forward, backward = Fraction(1), Fraction(2)
    for p in range(1, 9):
        for m in range(1, 17):
            span = makespan(Schedule(method, p, m).program(1), forward, backward)

            assert span == (m + p - 1) * (forward + backward)


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 8), (4, 2, 4), (4, 4, 16), (8, 3, 24), (2, 2, 4), (4, 2, 12)])
def test_time_of_interleaving(p: int, v: int, m: int) -> None:
    """Specs section 4.2; a stage is 1/v of a rank's layers."""
    forward, backward = Fraction(1), Fraction(2)
    span = makespan(Schedule("interleaved", p, m, v).program(1), forward / v, backward / v)

    assert span == m * (forward + backward) + (p - 1) * (forward + backward) / v


@pytest.mark.parametrize("method", ["pipedream", "2bw"])
def test_no_rank_waits_in_steady_state(method: str) -> None:
    """Without a flush, a minibatch more costs exactly its own work."""
    for p in range(1, 7):
        spans = [makespan(Schedule(method, p, p).program(n), Fraction(1), Fraction(2)) for n in (4, 5, 6)]

        assert spans[2] - spans[1] == spans[1] - spans[0] == 3 * p


@given(schedules(6, 12), st.integers(0, 3))
def test_steady_steps_differ_by_their_numbers_only(schedule: Schedule, later: int) -> None:
    """Step t is computed from t, not from all steps before; a late step is an early one, renumbered."""
    m, per_update = schedule.microbatches, schedule.microbatches_per_update
    early = 2 + 2 * schedule.ranks // m
    distance = 10**9 + later

    def renumber(action: Action) -> Action:  # type: ignore[return]
        more, newer = distance * m, distance * m // per_update
        match action:
            case Forward(stage, k, version):
                return Forward(stage, k + more, version + newer)
            case Backward(stage, k, version):
                return Backward(stage, k + more, version + newer)
            case BackwardInput(stage, k, version):
                return BackwardInput(stage, k + more, version + newer)
            case BackwardWeight(stage, k, version):
                return BackwardWeight(stage, k + more, version + newer)
            case Update(stage, version, gradient_version):
                return Update(stage, version + newer, gradient_version + newer)
            case Send(stage, k, target):
                return Send(stage, k + more, target)
            case Receive(stage, k, source):
                return Receive(stage, k + more, source)

    renumbered = tuple(tuple(map(renumber, row)) for row in schedule.step(early))
    assert schedule.step(early + distance) == renumbered


@given(schedules(6, 12), st.integers(0, 4))
def test_a_program_is_its_steps_and_its_drain(schedule: Schedule, minibatches: int) -> None:
    parts = [*(schedule.step(t) for t in range(minibatches)), schedule.drain(minibatches)]

    assert schedule.program(minibatches) == tuple(
        tuple(a for part in parts for a in part[r]) for r in range(schedule.ranks)
    )
    if schedule.flushes:
        assert schedule.drain(minibatches) == ((),) * schedule.ranks
