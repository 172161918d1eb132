"""What the invariants are checked on: programs laid out by stage, and the error for a violation.

The checks need two things: what a replica of a stage computes, in order, and where that stands in its rank's row.
Both are worked out here once, so that each check is a short loop. Replicas that share every microbatch must do the
same, action by action; that is checked first, and one of them then stands for all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NoReturn, TypeAlias, assert_never

from penstock.errors import ScheduleError
from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Receive,
    ReceiveNorms,
    ReceiveTied,
    Reduce,
    Send,
    SendNorms,
    SendTied,
    Update,
)
from penstock.scheduling.definitions import Guarantees, PipelineShape, Segment
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Programs, Schedule

Turn: TypeAlias = tuple[int, Compute]
"""What a stage computes, behind its index in the row of its rank."""

_REACH = 7  # actions shown on either side of the offending one


@dataclass(frozen=True, slots=True)
class Replica:
    """What a replica of `stage`, on `rank`, computes."""

    stage: int
    rank: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class StagedPrograms:
    """Programs to be verified, laid out by stage.

    `programs`: the rows of actions, segments joined; empty for a rank that another one stands for. `segments`: the
    steps and the drain that they were joined from, or none if the programs came whole. `ends[segment][rank]`: where a
    segment ends in a row. `placement`: where the stages are, without ranks that others stand for. `replicas`: by
    stage.
    """

    schedule: Schedule
    minibatches: int
    programs: Programs
    segments: tuple[Segment, ...]
    ends: tuple[tuple[int, ...], ...]
    placement: Placement
    replicas: tuple[Replica, ...]

    @property
    def shape(self) -> PipelineShape:
        """The sizes of the pipeline."""
        return self.schedule.shape

    @property
    def guarantees(self) -> Guarantees:
        """What the schedule guarantees."""
        return self.schedule.guarantees

    @property
    def microbatches(self) -> int:
        """How many microbatches the programs run."""
        return self.minibatches * self.schedule.microbatches


def collect(
    schedule: Schedule, minibatches: int, segments: Sequence[Segment], programs_of: Sequence[Programs]
) -> StagedPrograms:
    """Joins the programs of the segments, in order; `ScheduleError` if there is not one row for each rank, or an action
    is on the wrong rank or of a stage or a microbatch that is not there."""
    rows: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    ends: list[tuple[int, ...]] = []
    for piece in programs_of:
        if len(piece) != schedule.ranks:
            raise ScheduleError(
                f"schedule {schedule.name!r}: expected one row of actions for each of its {schedule.ranks} ranks, "
                f"found {len(piece)} rows; give an empty row to a rank that has nothing to do"
            )
        first = _first_of_each(schedule.placement, piece) if schedule.placement.split else range(schedule.ranks)
        for rank in first:
            rows[rank].extend(piece[rank])
        ends.append(tuple(len(row) for row in rows))
    programs = tuple(tuple(row) for row in rows)
    placement = schedule.placement.first_replicas if schedule.placement.split else schedule.placement
    replicas = _arrange(schedule, placement, minibatches * schedule.microbatches, programs)
    return StagedPrograms(
        schedule=schedule,
        minibatches=minibatches,
        programs=programs,
        segments=tuple(segments),
        ends=tuple(ends),
        placement=placement,
        replicas=replicas,
    )


def _first_of_each(placement: Placement, programs: Programs) -> Iterable[int]:
    """The first replica's rank of every stage; `ScheduleError` if another one's row differs from its."""
    ranks = sorted(set(placement.stages))
    for first, *others in ranks:
        for other in others:
            if programs[other] != programs[first]:
                index = next(
                    (at for at, pair in enumerate(zip_longest(programs[first], programs[other])) if pair[0] != pair[1])
                )
                raise ScheduleError(
                    "a schedule violates an invariant: replicas that share every microbatch do the same\n"
                    f"  {show_row(programs, first, index)}\n  {show_row(programs, other, index)}\n"
                    "  fix: give them one row"
                )
    return [first for first, *_ in ranks]


def _arrange(schedule: Schedule, placement: Placement, microbatches: int, programs: Programs) -> tuple[Replica, ...]:
    invariant = "an action is of a stage of its rank and of a microbatch of the program"
    turns: dict[tuple[int, int], list[Turn]] = {
        (stage, rank): [] for stage, ranks in enumerate(placement.stages) for rank in ranks
    }
    for rank, row in enumerate(programs):
        mine = set(schedule.stages_of(rank))
        for index, action in enumerate(row):
            if action.stage not in mine:
                _raise_violation(
                    schedule,
                    programs,
                    invariant=invariant,
                    rank=rank,
                    index=index,
                    expected=f"stages {sorted(mine)} on rank {rank}",
                    fix="move the action",
                )
            match action:
                case Forward() | Backward() | BackwardInput() | BackwardWeight():
                    turns[action.stage, rank].append((index, action))
                case Update():
                    turns[action.stage, rank].append((index, action))
                    continue
                case SendTied() | ReceiveTied() | SendNorms() | ReceiveNorms() | Reduce():
                    continue
                case Send() | Receive():
                    pass
                case _:
                    assert_never(action)
            if action.microbatch >= microbatches:
                expected = f"microbatches 0 to {microbatches - 1}"
                _raise_violation(
                    schedule,
                    programs,
                    invariant=invariant,
                    rank=rank,
                    index=index,
                    expected=expected,
                    fix="drop the action, or verify more minibatches",
                )
    return tuple(Replica(stage, rank, tuple(computed)) for (stage, rank), computed in turns.items())


def report(staged: StagedPrograms, invariant: str, rank: int, index: int, *, expected: str, fix: str) -> NoReturn:
    """Raises the `ScheduleError` for a violation of `invariant` by the action at `index` in the row of `rank`.

    An index past the row's end says that something is missing there.
    """
    _raise_violation(
        staged.schedule, staged.programs, invariant=invariant, rank=rank, index=index, expected=expected, fix=fix
    )


def _raise_violation(
    schedule: Schedule, programs: Programs, *, invariant: str, rank: int, index: int, expected: str, fix: str
) -> NoReturn:
    raise ScheduleError(
        f"schedule {schedule.name!r} violates an invariant: {invariant}\n"
        f"  {show_row(programs, rank, index)}\n"
        f"  expected: {expected}\n"
        f"  fix: {fix}"
    )


def show_row(programs: Programs, rank: int, index: int) -> str:
    """The text of a rank's row around `index`, that action marked: ``rank 1: ... 1F0@0 >>1B0@1<< 1U1<0 ...``."""
    row = programs[rank]
    first, stop = max(0, index - _REACH), min(len(row), index + _REACH + 1)
    words = [f"rank {rank}:", *(["..."] if first else [])]
    words += _mark(map(str, row[first:stop]), index - first)
    if index >= len(row):
        words.append(">>end<<")
    if stop < len(row):
        words.append("...")
    return " ".join(words)


def _mark(words: Iterable[str], marked: int) -> Iterable[str]:
    return (f">>{word}<<" if place == marked else word for place, word in enumerate(words))
