"""Schedules from programs that are written by hand, or found by a search: one step, for one pipeline.

The programs say what each rank computes in the first minibatch; later ones are the same with other numbers. Messages
are derived, as for every schedule, so that those in the programs are left out. The part of every row between two bars
is repeated, so that one text serves minibatches of many microbatches.

PyTorch's CSV of an order goes in and out as well: a line for each rank, an action in each cell. It has no updates and
no versions: an optimizer steps when all ranks are done.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias, assert_never

from penstock.errors import ScheduleError
from penstock.scheduling.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    HostCopy,
    Offload,
    Reload,
    Update,
    format_programs,
    parse,
    program_rows,
)
from penstock.scheduling.definitions import (
    Drain,
    Guarantees,
    PipelineShape,
    ScheduleDefinition,
    Segment,
    count_in_flight,
)
from penstock.scheduling.placements import StageLayout
from penstock.scheduling.schedules import Programs, Schedule


def define_by_programs(name: str, programs: str | Programs) -> ScheduleDefinition:
    """The schedule `name` that flushes and whose first step is `programs`: a row of actions per rank, or their text.

    ``rank 0: 0F0@0 0F1@0 0B0@0 0B1@0 0U1<0``, and so on; the ``rank 0:`` may be left out. It runs with the ranks,
    stages and microbatches of the programs only. With two bars in every row, as in
    ``0F0@0 | 0F1@0 0B0@0 | 0B1@0 0U1<0``, what is between them is repeated for minibatches of more microbatches: each
    time its numbers rise by the microbatches that it forwards, and those after it follow. What is kept in flight is
    counted. `ScheduleError` if the stages lie as in no `StageLayout`, or if a repeated part does not forward and
    backward equally many microbatches of every stage; whether the programs are right is proved by `verify`.
    """
    text = programs if isinstance(programs, str) else format_programs(programs)
    return _define(name, tuple(_read_row(name, rank, line) for rank, line in enumerate(program_rows(text))))


_COMPUTE = re.compile(r"([0-9]{1,9})[FBIW][0-9]{1,9}")
_MESSAGE = re.compile(r"\d+(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
"""What PyTorch adds to such an order itself."""
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


def read_torch_csv(name: str, text: str) -> ScheduleDefinition:
    """The schedule `name` that flushes and computes in the order of `text`, a CSV such as ``_dump_csv`` of PyTorch's
    ``_PipelineScheduleRuntime`` writes. ``(0F1;1B0)OVERLAP_F_B`` is read as its parts, one after the other. Messages
    are left out, since they are derived. `ScheduleError` names the rank and the cell that cannot be read.
    """
    rows = []
    for rank, cells in enumerate(csv.reader(io.StringIO(text.strip()))):
        words: list[str] = []
        for cell in cells:
            overlapped = _OVERLAPPED.fullmatch(cell.strip())
            words += (overlapped[1] if overlapped else cell).replace(";", " ").split()
        for word in words:
            if not (_COMPUTE.fullmatch(word) or _MESSAGE.fullmatch(word)):
                raise ScheduleError(
                    f"schedule {name!r}: rank {rank}: cannot read {word!r:.60} of the CSV: expected actions such as "
                    "0F1, 1B0, 1I0, 1W0 or (0F1;1B0)OVERLAP_F_B, a line for each rank. Write it so"
                )
        computed = [match for word in words if (match := _COMPUTE.fullmatch(word))]
        updates = [f"{stage}U1<0" for stage in sorted({int(match[1]) for match in computed})]
        rows.append(" ".join([f"rank {rank}:", *(f"{match[0]}@0" for match in computed), *updates]))
    return define_by_programs(name, "\n".join(rows))


def torch_csv(schedule: Schedule) -> str:
    """The CSV of what the ranks of `schedule` compute in a step, for PyTorch's ``_load_csv``. It has no offloads.

    `ScheduleError` for a schedule that never flushes, or with replicas: PyTorch has no such orders.
    """
    if not schedule.flushes or schedule.ranks > schedule.placement.length:
        raise ScheduleError(
            f"schedule {schedule.name!r}: expected one that flushes, without replicas, for PyTorch's CSV, which has "
            "neither versions of weights nor replicas; choose another schedule or plan"
        )
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    for row in schedule.step(0):
        actions = [action for action in row if isinstance(action, Compute) and not isinstance(action, Update)]
        writer.writerow([str(action).partition("@")[0] for action in actions])
    return made.getvalue()


@lru_cache(maxsize=64)
def _define(name: str, rows: tuple["_Row", ...]) -> ScheduleDefinition:
    """Plans with the same programs compare equal, since they have the same definition."""
    written = _Written(name, rows)
    written.check_numbers()
    written.check_rounds()
    return ScheduleDefinition(
        name,
        written.order,
        written.guarantees,
        written.check,
        layout=written.find_layout(),
        splits_backward=any(isinstance(action, BackwardInput) for row in rows for action in row.once),
        programs=tuple(map(str, rows)),
    )


_Own: TypeAlias = Compute | HostCopy


@dataclass(frozen=True, slots=True)
class _Row:
    """What a rank computes and offloads: `start`, then `middle` as often as it takes, then `end`."""

    start: tuple[_Own, ...]
    middle: tuple[_Own, ...] = ()
    end: tuple[_Own, ...] = ()

    @property
    def once(self) -> tuple[_Own, ...]:
        """The row with its middle once."""
        return self.start + self.middle + self.end

    def __str__(self) -> str:
        parts = (self.start, self.middle, self.end) if self.middle else (self.start,)
        return " | ".join(" ".join(map(str, part)) for part in parts)


def _read_row(name: str, rank: int, line: str) -> _Row:
    try:
        parts = [[parse(word) for word in part.split()] for part in line.split("|")]
    except ScheduleError as error:
        raise ScheduleError(f"schedule {name!r}: rank {rank}: {error}") from None
    if len(parts) not in (1, 3):
        raise ScheduleError(
            f"schedule {name!r}: rank {rank}: expected no bar, or two around the part that is repeated, found "
            f"{len(parts) - 1}; write start | middle | end"
        )
    return _Row(*(tuple(action for action in part if isinstance(action, _Own)) for part in parts))


@dataclass(frozen=True, slots=True)
class _Written:
    """The programs of one step, without messages."""

    name: str
    rows: tuple[_Row, ...]

    def order(self, shape: PipelineShape, rank: int, segment: Segment) -> Iterator[_Own]:
        """The row of the rank's stages, with the numbers of the step's minibatch."""
        if isinstance(segment, Drain):
            return
        row, minibatch = self.rows[min(shape.stages_of(rank))], segment.minibatch
        more = shape.microbatches - self.microbatches
        first = minibatch * shape.microbatches
        yield from _numbered(row.start, first, minibatch)
        for done in range(0, more + 1, self.round or more + 1):
            yield from _numbered(row.middle, first + done, minibatch)
        yield from _numbered(row.end, first + more, minibatch)

    def guarantees(self, shape: PipelineShape) -> Guarantees:
        """What is counted along the rows."""
        self.check(shape)
        return count_in_flight(self.order, shape)

    def check(self, shape: PipelineShape) -> None:
        """The shape must be that of the programs."""
        placement = shape.placement
        found = (placement.length, shape.stages, placement.ranks)
        expected = (len(self.rows), self.stages, len(self.rows))
        more = shape.microbatches - self.microbatches
        fits = more % self.round == 0 and more >= 0 if self.round else more == 0
        if not fits or (found != expected and not (placement.split and found[:2] == expected[:2])):
            count = f"{self.microbatches}{f' (or {self.round} more, any number of times)' if self.round else ''}"
            raise ScheduleError(
                f"schedule {self.name!r}: expected {expected[0]} ranks, {expected[1]} stages without replicas and "
                f"{count} microbatches, for which its programs are written, found {found[2]} ranks, {found[1]} "
                f"stages ({placement.text()} replicas) and {shape.microbatches} microbatches; plan for the programs, "
                "or write others"
            )

    def check_numbers(self) -> None:
        """Stages and microbatches must follow each other, so that few actions ask for few of them; versions and
        offloads must be those of the first minibatch, since no others run.
        """
        actions = [action for row in self.rows for action in row.once]
        kinds = (Forward, Backward, BackwardInput, BackwardWeight)
        batches = {action.microbatch for action in actions if isinstance(action, kinds)}
        for what, found in (("stages", {action.stage for action in actions}), ("microbatches", batches)):
            if found and max(found) >= len(found):
                lacking = next(number for number in range(len(found)) if number not in found)
                raise ScheduleError(
                    f"schedule {self.name!r}: expected actions of the {what} from 0 to {max(found)}, found none of "
                    f"{lacking}; number the {what} without gaps"
                )
        for rank, row in enumerate(self.rows):
            most = max(2, sum(isinstance(action, kinds) for action in row.once))
            for action, right in zip(row.once, _numbered(row.once, 0, 0), strict=True):
                if isinstance(right, Offload):
                    right = replace(right, behind=min(right.behind, most))
                if action != right:
                    raise ScheduleError(
                        f"schedule {self.name!r}: rank {rank}: expected {right}, found {action}: programs have the "
                        "versions of the first minibatch, which are 0 and <0, and an offload counts no more forwards "
                        f"and backwards than its row has. Write {right}"
                    )

    def check_rounds(self) -> None:
        """The middles of all rows must forward and backward equally many microbatches of every stage of theirs."""
        for rank, row in enumerate(self.rows):
            for stage in sorted({action.stage for action in row.once}):
                made = [action for action in row.middle if action.stage == stage]
                forwards = sum(isinstance(action, Forward) for action in made)
                ended = sum(isinstance(action, Backward | BackwardWeight) for action in made)
                halves = sum(isinstance(action, Backward | BackwardInput) for action in made)
                updates = any(isinstance(action, Update) for action in made)
                if {forwards, ended, halves} != {self.round} or updates:
                    raise ScheduleError(
                        f"schedule {self.name!r}: rank {rank}: expected the part between the bars to have {self.round} "
                        f"forwards and as many backwards of stage {stage} and no update, as that of the first row has, "
                        f"found {forwards} forwards, {halves} input or whole backwards, {ended} weight or whole "
                        f"backwards{' and an update' if updates else ''}; move the bars"
                    )

    @property
    def round(self) -> int:
        """The microbatches of the part that is repeated; 0 without one."""
        middle = self.rows[0].middle if self.rows else ()
        return sum(isinstance(action, Forward) and action.stage == middle[0].stage for action in middle)

    @property
    def stages(self) -> int:
        return 1 + max((action.stage for row in self.rows for action in row.once), default=-1)

    @property
    def microbatches(self) -> int:
        """The microbatches of the rows as they are written."""
        return 1 + max(
            (action.microbatch for row in self.rows for action in row.once if not isinstance(action, Update)),
            default=-1,
        )

    def find_layout(self) -> StageLayout:
        """The layout that has the stages on the ranks where the rows have them."""
        held = [tuple(sorted({action.stage for action in row.once})) for row in self.rows]
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


def _numbered(actions: Iterable[_Own], first: int, minibatch: int) -> Iterator[_Own]:
    """`actions` of the first minibatch with the numbers of another one, whose microbatch 0 is `first`."""
    for action in actions:
        match action:
            case Update(stage):
                yield Update(stage, minibatch + 1, minibatch)
            case Forward(stage, microbatch) | Backward(stage, microbatch):
                yield type(action)(stage, first + microbatch, minibatch)
            case BackwardInput(stage, microbatch) | BackwardWeight(stage, microbatch):
                yield type(action)(stage, first + microbatch, minibatch)
            case Offload(_, microbatch) | Reload(_, microbatch):
                yield replace(action, microbatch=first + microbatch)
            case _:
                assert_never(action)
