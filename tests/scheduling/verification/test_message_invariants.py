"""Proofs on columns say what walks along the actions say, of schedules and of programs with planted faults."""

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Action, Receive, Send
from penstock.scheduling.definitions import Drain, Segment, Step
from penstock.scheduling.orders import INFERENCE
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Programs, Schedule
from penstock.scheduling.verification.continuations import continue_run
from penstock.scheduling.verification.message_invariants import has_data
from penstock.scheduling.verification.stage_invariants import require_stage_invariants
from penstock.scheduling.verification.verifier import Verification, prove, verify
from penstock.scheduling.verification.violations import StagedPrograms, collect
from support.own_schedules import EAGER, LATE
from support.schedule_strategies import replicated_schedules, schedules, waiting_schedules

EXAMPLES = [
    Schedule("gpipe", 4, 20),
    Schedule("1f1b-flush", 4, 20, skips=((0, 2), (1, 3))),
    Schedule("2bw", 3, 20, ties=((0, 2),), norms=True),
    Schedule("zb-h1", 4, 20, norms=True),
    Schedule("zb-v", 3, 20, 2),
    Schedule("spp", 3, 20),
    Schedule("interleaved", 3, 30, 2, ties=((0, 5),)),
    Schedule("pipedream", 4, 20, vertical_sync=True),
    continue_run(Schedule("pipedream", 4, 20, norms=True)),
    continue_run(Schedule("2bw", 3, 20)),
    Schedule.placed("pipedream", Placement(((0, 1), (2,), (3, 4, 5))), 20),
    Schedule.placed("1f1b-flush", Placement(((0, 1), (2,), (3,))), 20),
    Schedule.placed("1f1b-flush", Placement(((0, 1), (2,)), split=True), 20),
    Schedule(INFERENCE, 3, 20),
    Schedule(EAGER, 3, 20),
    Schedule(LATE, 2, 20),
]


def segments(minibatches: int) -> list[Segment]:
    return [*map(Step, range(minibatches)), Drain(minibatches)]


def programs_of(schedule: Schedule, minibatches: int) -> list[Programs]:
    return [*map(schedule.step, range(minibatches)), schedule.drain(minibatches)]


def stage(schedule: Schedule, programs: Sequence[Programs]) -> StagedPrograms:
    return collect(schedule, len(programs) - 1, segments(len(programs) - 1), programs)


def by_columns(schedule: Schedule, programs: Sequence[Programs]) -> Verification | None:
    """What is proved without a walk along all actions."""
    try:
        staged = stage(schedule, programs)
        _, turns = require_stage_invariants(staged)
        return prove(staged) if has_data(staged, turns) else None
    except ScheduleError:
        return None


def in_full(schedule: Schedule, programs: Sequence[Programs]) -> Verification | None:
    try:
        return prove(stage(schedule, programs), in_full=True)
    except ScheduleError:
        return None


@pytest.mark.parametrize("schedule", EXAMPLES, ids=lambda schedule: schedule.name)
def test_columns_prove_what_a_walk_along_the_actions_proves(schedule: Schedule) -> None:
    programs = programs_of(schedule, 3)

    assert by_columns(schedule, programs) == in_full(schedule, programs) is not None
    assert verify(schedule, 3) == verify(schedule, 3, in_full=True)


def many(ranks: int, microbatches: int) -> st.SearchStrategy[Schedule]:
    return st.one_of(
        schedules(ranks, microbatches), waiting_schedules(ranks, microbatches), replicated_schedules(3, 3, microbatches)
    )


@settings(max_examples=300, deadline=None)
@given(many(4, 24), st.integers(1, 3))
def test_every_schedule_is_proved_by_columns(schedule: Schedule, minibatches: int) -> None:
    programs = programs_of(schedule, minibatches)

    assert by_columns(schedule, programs) == in_full(schedule, programs) is not None


def plant_fault(data: st.DataObject, programs: list[Programs]) -> list[Programs]:
    """Changes one rank: at one place, or at regular distances in one step or of all steps."""
    rank = data.draw(st.integers(0, len(programs[0]) - 1), "rank")
    planted = [list(piece) for piece in programs]
    chosen = [step for step in range(len(programs)) if programs[step][rank]]
    if data.draw(st.booleans(), "one step"):
        chosen = [data.draw(st.sampled_from(chosen), "step")]
    kind = data.draw(st.sampled_from(["swap", "swap", "move", "drop", "repeat", "renumber", "renumber"]), "kind")
    first = data.draw(st.integers(0, max(len(programs[step][rank]) for step in chosen) - 1), "place")
    distance = data.draw(st.sampled_from([1, 1, 2, 3, 5, 8, -1, -2, -4]), "distance")
    every = data.draw(st.sampled_from([0, 0, 4, 6, 12]), "every")
    number, by = data.draw(st.integers(0, 2), "field"), data.draw(st.sampled_from([-1, 1]), "by")
    for step in chosen:
        row = list(programs[step][rank])
        places = range(first, len(row), every) if every else [min(first, len(row) - 1)]
        # From the end, so that the places before it stay where they are.
        for here in reversed(places):
            there = min(max(here + distance, 0), len(row) - 1)
            match kind:
                case "swap":
                    row[here], row[there] = row[there], row[here]
                case "move":
                    row.insert(there, row.pop(here))
                case "drop":
                    row.pop(here)
                case "repeat":
                    row.insert(there, row[here])
                case "renumber":
                    row[here] = renumbered(row[here], number, by)
        planted[step][rank] = tuple(row)
    return [tuple(piece) for piece in planted]


def renumbered(action: Action, number: int, by: int) -> Action:
    """The action with one of its fields changed by `by`, not below 0."""
    names = [field.name for field in fields(action)]
    name = names[number % len(names)]
    return replace(action, **{name: max(getattr(action, name) + by, 0)})


@pytest.mark.slow
@settings(max_examples=800, deadline=None)
@given(many(3, 12), st.integers(1, 3), st.integers(1, 2), st.data())
def test_both_proofs_say_the_same_of_planted_faults(
    schedule: Schedule, minibatches: int, faults: int, data: st.DataObject
) -> None:
    programs = programs_of(schedule, minibatches)
    for _ in range(faults):
        programs = plant_fault(data, programs)
    found, due = by_columns(schedule, programs), in_full(schedule, programs)
    event("proved" if due else "refused")
    assert found == due


def exchanged(programs: Sequence[Programs], data: st.DataObject) -> list[Programs]:
    """Two neighbors of a row exchanged, of which at least one is a message; a fault that only other ranks show."""
    places = [
        (step, rank, place)
        for step, piece in enumerate(programs)
        for rank, row in enumerate(piece)
        for place in range(len(row) - 1)
        if isinstance(row[place], Send | Receive) or isinstance(row[place + 1], Send | Receive)
    ]
    assume(places)
    changed = [list(piece) for piece in programs]
    for step, rank, place in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=6, unique=True)):
        row = list(changed[step][rank])
        row[place : place + 2] = row[place + 1], row[place]
        changed[step][rank] = tuple(row)
    return [tuple(piece) for piece in changed]


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(many(3, 8), st.data())
def test_both_proofs_say_the_same_of_exchanged_messages(schedule: Schedule, data: st.DataObject) -> None:
    programs = exchanged(programs_of(schedule, 2), data)
    found, due = by_columns(schedule, programs), in_full(schedule, programs)
    event("proved" if due else "refused")
    assert found == due


def sent_late(row: tuple[Action, ...]) -> tuple[Action, ...]:
    """The row with every send behind the receive that directly follows it."""
    made = list(row)
    for place in reversed(range(len(made) - 1)):
        if isinstance(made[place], Send) and isinstance(made[place + 1], Receive):
            made[place : place + 2] = made[place + 1], made[place]
    return tuple(made)


def test_ranks_that_wait_for_each_other_are_found() -> None:
    """Again and again each of two ranks receives before it sends what the other one waits for."""
    schedule = Schedule("1f1b-flush", 2, 12)
    broken = [tuple(map(sent_late, piece)) for piece in programs_of(schedule, 1)]

    assert by_columns(schedule, broken) is None
    with pytest.raises(ScheduleError, match=r"no rank waits forever within step\(0\)"):
        prove(stage(schedule, broken), in_full=True)
