"""Schedules from programs that are written by hand, or found by a search: one step, for one shape of pipeline.

The programs say what each rank computes in the first minibatch; later ones are the same with other numbers. Messages
are derived, as for every schedule, so that those in the programs are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from penstock.errors import ScheduleError
from penstock.scheduling.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Update,
    parse_programs,
)
from penstock.scheduling.definitions import Drain, Guarantees, PipelineShape, ScheduleDefinition, Segment
from penstock.scheduling.placements import StageLayout
from penstock.scheduling.schedules import Programs


def define_by_programs(name: str, programs: str | Programs) -> ScheduleDefinition:
    """The schedule `name` that flushes and whose first step is `programs`: a row of actions per rank, or their text.

    ``rank 0: 0F0@0 0F1@0 0B0@0 0B1@0 0U1<0``, and so on; see `parse_programs`. It runs with the ranks, stages and
    microbatches of the programs only. What it keeps in flight is counted. `ScheduleError` if the stages lie as in no
    `StageLayout`; whether the programs are right is proved by `verify`.
    """
    parsed = parse_programs(programs) if isinstance(programs, str) else programs
    rows = tuple(tuple(action for action in row if isinstance(action, Compute)) for row in parsed)
    written = _Written(name, rows)
    return ScheduleDefinition(
        name,
        written.order,
        written.guarantees,
        written.check,
        layout=written.find_layout(),
        splits_backward=any(isinstance(action, BackwardInput) for row in rows for action in row),
    )


@dataclass(frozen=True, slots=True)
class _Written:
    """The programs of one step, of compute actions alone."""

    name: str
    rows: tuple[tuple[Compute, ...], ...]

    def order(self, shape: PipelineShape, rank: int, segment: Segment) -> Iterator[Compute]:
        """The row of the rank's stages, with the numbers of the step's minibatch."""
        if isinstance(segment, Drain):
            return
        held, minibatch = shape.stages_of(rank), segment.minibatch
        first = minibatch * shape.microbatches
        for action in self.rows[min(held)]:
            match action:
                case Update(stage):
                    yield Update(stage, minibatch + 1, minibatch)
                case Forward(stage, microbatch) | Backward(stage, microbatch):
                    yield type(action)(stage, first + microbatch, minibatch)
                case BackwardInput(stage, microbatch) | BackwardWeight(stage, microbatch):
                    yield type(action)(stage, first + microbatch, minibatch)
                case _:
                    assert_never(action)

    def guarantees(self, shape: PipelineShape) -> Guarantees:
        """What is counted along the rows."""
        self.check(shape)
        in_flight, pending = [0] * shape.stages, [0] * shape.stages
        of_row = [0] * len(self.rows)
        for number, row in enumerate(self.rows):
            now, half = dict.fromkeys(range(shape.stages), 0), dict.fromkeys(range(shape.stages), 0)
            for action in row:
                stage = action.stage
                now[stage] += isinstance(action, Forward) - isinstance(action, Backward | BackwardWeight)
                half[stage] += isinstance(action, BackwardInput) - isinstance(action, BackwardWeight)
                in_flight[stage] = max(in_flight[stage], now[stage])
                pending[stage] = max(pending[stage], half[stage])
                of_row[number] = max(of_row[number], sum(now.values()))
        return Guarantees.of(
            shape,
            in_flight,
            pending_weight_backwards=pending,
            in_flight_of_rank=[of_row[min(shape.stages_of(rank))] for rank in range(shape.ranks)],
        )

    def check(self, shape: PipelineShape) -> None:
        """The shape must be that of the programs."""
        placement = shape.placement
        found = (placement.length, shape.stages, shape.microbatches, placement.ranks)
        expected = (len(self.rows), self.stages, self.microbatches, len(self.rows))
        if found != expected and not (placement.split and found[:3] == expected[:3]):
            raise ScheduleError(
                f"schedule {self.name!r}: expected {expected[0]} ranks, {expected[1]} stages without replicas and "
                f"{expected[2]} microbatches, for which its programs are written, found {found[3]} ranks, {found[1]} "
                f"stages ({placement.text()} replicas) and {found[2]} microbatches; plan for the programs, or write "
                "others"
            )

    @property
    def stages(self) -> int:
        return 1 + max((action.stage for row in self.rows for action in row), default=-1)

    @property
    def microbatches(self) -> int:
        return 1 + max(
            (action.microbatch for row in self.rows for action in row if not isinstance(action, Update)), default=-1
        )

    def find_layout(self) -> StageLayout:
        """The layout that has the stages on the ranks where the rows have them."""
        held = [tuple(sorted({action.stage for action in row})) for row in self.rows]
        for layout in StageLayout:
            dealt = layout.ranks(self.stages, len(self.rows)) if self.rows else ()
            accepted = bool(self.stages) and layout.accepts(self.stages // len(self.rows))
            if accepted and held == [_stages_on(rank, dealt) for rank in range(len(self.rows))]:
                return layout
        raise ScheduleError(
            f"schedule {self.name!r}: expected stages on ranks in turn or in a V (r and 2p - 1 - r on rank r), "
            f"found {', '.join(f'{list(stages)} on rank {rank}' for rank, stages in enumerate(held)) or 'no rows'}; "
            "number the stages so"
        )


def _stages_on(rank: int, dealt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(stage for stage, at in enumerate(dealt) if at == rank)
