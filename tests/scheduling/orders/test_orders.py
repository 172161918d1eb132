"""The orders of the methods: their tables, their promises, and the time they take."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduling.actions import Action, Backward, Forward, Update
from penstock.scheduling.orders import (
    breadth_first,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b_flush,
    pipedream,
    spp,
    two_bw,
    v_half,
    v_min,
    zb_h1,
    zb_v,
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


def draw(schedule: Schedule, word: Callable[[Action], str]) -> list[str]:
    """One step, a column for every forward and backward, or for every part of a backward where some have parts."""
    parts = Fraction(2 if schedule.definition.splits_backward else 1)
    lines = []
    for rank, row in enumerate(run_clock(schedule.step(0), backward=parts, weight=parts / 2)):
        words, tick = [f"rank {rank}"], 0
        for action, start in row:
            own = [word(action)]
            words += ["." * len(own[0])] * (int(start) - tick)
            own += ["-" * len(own[0])] * (int(parts) - 1) if isinstance(action, Backward) else []
            words += own
            tick = int(start) + (0 if isinstance(action, Update) else len(own))
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


TABLES = [
    (gpipe, Schedule("gpipe", 3, 3), short),
    (one_f_one_b_flush, Schedule("1f1b-flush", 3, 4), short),
    (interleaved, Schedule("interleaved", 2, 2, 2), with_stage),
    (breadth_first, Schedule("breadth-first", 2, 2, 2), with_stage),
    (forward_only, inference(2, 2, 3), with_stage),
    (spp, Schedule("spp", 2, 6), short),
    (zb_h1, Schedule("zb-h1", 3, 4), short),
    (zb_v, Schedule("zb-v", 2, 3, 2), with_stage),
    (v_half, Schedule("v-half", 2, 3, 2), with_stage),
    (v_min, Schedule("v-min", 2, 3, 2), with_stage),
]


@pytest.mark.parametrize(("module", "schedule", "word"), TABLES, ids=[str(table[1].name) for table in TABLES])
def test_tables_of_one_step(module: object, schedule: Schedule, word: Callable[[Action], str]) -> None:
    """The comments above the orders; that of SPP is INFOCOM 2022, figure 4."""
    assert draw(schedule, word) == drawn_table(module) != []


def test_pipedream_table() -> None:
    schedule = Schedule("pipedream", 3, 1)
    steps = tuple(tuple(a for t in range(4) for a in schedule.step(t)[rank]) for rank in range(3))
    assert draw_parts([steps, schedule.drain(4)], with_version) == drawn_table(pipedream)
    # Four microbatches in one step are the same program.
    assert Schedule("pipedream", 3, 4).program(1) == schedule.program(4)


def test_two_bw_table() -> None:
    schedule, waiting = Schedule("2bw", 3, 3), Schedule("2bw", 3, 3, norms=True)
    table = draw_parts([schedule.step(0), schedule.step(1), schedule.drain(2)], short)
    late = draw_parts([waiting.step(1), waiting.step(2), waiting.drain(3)], short)

    assert [" ".join(line.split()) for line in table + late] == drawn_table(two_bw)


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


def every_schedule(most_ranks: int, most_microbatches: int, most_stages: int):
    for ranks in range(1, most_ranks + 1):
        for microbatches in range(1, most_microbatches + 1):
            yield Schedule("gpipe", ranks, microbatches)
            for per_rank in range(1, max(1, most_stages // ranks) + 1):
                yield Schedule("breadth-first", ranks, microbatches, per_rank)
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
    for schedule in every_schedule(4, 8, 3):
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

    later_by = {"microbatch": distance * m, "version": distance * m // per_update}
    later_by["gradient_version"] = later_by["version"]

    def renumber(action: Any) -> Action:
        numbers = {name: getattr(action, name, None) for name in later_by}
        return replace(action, **{name: at + later_by[name] for name, at in numbers.items() if at is not None})

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
