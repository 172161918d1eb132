"""What the invariants are checked on, what the programs reach, and the error for a violation.

Replicas that share every microbatch must do the same, action by action; that is checked first, and one of them then
stands for all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NoReturn

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Action
from penstock.scheduling.definitions import Guarantees, PipelineShape
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Programs, Schedule

_REACH = 7  # actions shown on either side of the offending one


@dataclass(slots=True)
class Peaks:
    """What the programs reach: see `Verification`."""

    in_flight: list[int]
    versions: list[int]
    in_flight_of_rank: list[int]
    pending_weight_backwards: list[int]
    actions: int = 0

    @classmethod
    def of(cls, shape: PipelineShape) -> "Peaks":
        """The peaks of programs without actions."""
        return cls([0] * shape.stages, [1] * shape.stages, [0] * shape.ranks, [0] * shape.stages)

    def share(self, placement: Placement) -> None:
        """Gives the ranks that another one stands for what that one has reached."""
        for first, *others in placement.stages if placement.split else ():
            for rank in others:
                self.in_flight_of_rank[rank] = self.in_flight_of_rank[first]


@dataclass(frozen=True, slots=True)
class StagedPrograms:
    """Programs to be verified.

    `programs`: the rows of actions, segments joined; empty for a rank that another one stands for.
    `ends[segment][rank]`: where a segment ends in a row. `placement`: where the stages are, without ranks that others
    stand for.
    """

    schedule: Schedule
    minibatches: int
    programs: Programs
    ends: tuple[tuple[int, ...], ...]
    placement: Placement

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

    @property
    def in_segments(self) -> bool:
        """Whether the programs came as steps and their drain, and not as whole rows."""
        return len(self.ends) > 1

    def name_of(self, segment: int) -> str:
        """The segment of this number as the call that makes it."""
        return f"drain({segment})" if segment == self.minibatches else f"step({segment})"


def collect(schedule: Schedule, minibatches: int, programs_of: Sequence[Programs]) -> StagedPrograms:
    """Joins the programs of the segments, in order; `ScheduleError` if there is not one row for each rank."""
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
    return StagedPrograms(
        schedule=schedule, minibatches=minibatches, programs=programs, ends=tuple(ends), placement=placement
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


def report(staged: StagedPrograms, invariant: str, rank: int, index: int, *, expected: str, fix: str) -> NoReturn:
    """Raises the `ScheduleError` for a violation of `invariant` by the action at `index` in the row of `rank`.

    An index past the row's end says that something is missing there.
    """
    raise ScheduleError(
        f"schedule {staged.schedule.name!r} violates an invariant: {invariant}\n"
        f"  {show_row(staged.programs, rank, index)}\n"
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
