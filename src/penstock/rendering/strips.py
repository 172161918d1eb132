"""Strips of text: a timeline as one row of characters per rank, time to the right.

A schedule and a measurement are drawn by this one hand; they differ in how many columns a second takes. A rank with
several stages has a row for each, so that every row reads as the pipeline of its stage.

     3       forward of microbatch 3, until the next thing or a dot; `-` where there is no room for the number
    [3]      its backward, or the input backward, from bracket to bracket; `=` where there is no room
    {3}      its weight backward
     3@1     the same with weights of version 1, while the stage has a newer one
    U        update, drawn at its moment: it takes no time, or little
    ++       the sum of the replicas' gradients, where it takes time
     .       idle (blank where the rank is busy with another of its stages)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline

__all__ = ["Mark", "Strip", "draw_strips", "last_column", "read_marks"]

_HEIGHTS = {"reduce": 0, "update": 2}
"""A sum of gradients may go on below a computation; everything else is 1."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A computation of a timeline, or a sum of gradients, with the label that it carries where there is room for it."""

    span: Span
    label: str
    """The microbatch, and the version if it is not the stage's newest; nothing for a sum of gradients."""


@dataclass(frozen=True, slots=True)
class Strip:
    """The row of one stage on one rank; of none if the rank does nothing."""

    rank: int
    stage: int | None
    text: str


def read_marks(timeline: Timeline) -> tuple[Mark, ...]:
    """What `timeline` shows, rank by rank in the order in which it starts."""
    newest: dict[tuple[int, int], int] = {}
    marks = []
    own = (span for span in timeline.spans if span.computes or (span.kind == "reduce" and span.seconds > 0))
    for span in sorted(own, key=lambda span: (span.rank, span.start_seconds, span.stop_seconds)):
        held = span.rank, span.stage  # replicas update one by one
        if span.kind == "update":
            newest[held] = span.number
            marks.append(Mark(span, "U"))
        elif span.kind == "reduce":
            marks.append(Mark(span, ""))
        else:
            # A measurement may begin in the middle of a run: what ran first was the newest then, for all that is known.
            newest.setdefault(held, span.reference)
            old = f"@{span.reference}" if span.reference < newest[held] else ""
            marks.append(Mark(span, f"{span.number}{old}"))
    return tuple(marks)


def last_column(marks: Sequence[Mark], column_seconds: float) -> int:
    """How many columns the marks take, each `column_seconds` wide."""
    origin = _origin(marks)
    return max((_column(mark.span.stop_seconds - origin, column_seconds) for mark in marks), default=0)


def draw_strips(
    marks: Sequence[Mark], ranks: int, column_seconds: float, columns: int, dot_columns: int
) -> tuple[Strip, ...]:
    """The rows of `marks` in the first `columns` columns and one more, which only the mark of a last update needs.

    There is a dot in every `dot_columns` idle columns.
    """
    origin = _origin(marks)
    strips = []
    rows: list[list[Mark]] = [[] for _ in range(ranks)]
    for mark in marks:
        rows[mark.span.rank].append(mark)
    for rank, own in enumerate(rows):
        held: list[int | None] = [*sorted({mark.span.stage for mark in own})]
        for stage in held or [None]:
            # A long run has far more than is drawn of it.
            near = [mark for mark in own if mark.span.start_seconds - origin <= (columns + 1) * column_seconds]
            row = ["." if column % dot_columns == 1 else " " for column in range(columns)] + [" "]
            # What is written later lies on top: the row's own stage over the blanks, updates over everything.
            for mark in sorted(near, key=lambda mark: (_HEIGHTS.get(mark.span.kind, 1), mark.span.stage == stage)):
                start = _column(mark.span.start_seconds - origin, column_seconds)
                stop = min(_column(mark.span.stop_seconds - origin, column_seconds), columns)
                if start > stop:
                    continue
                if mark.span.stage != stage:
                    row[start:stop] = " " * (stop - start)
                elif mark.span.kind == "update":
                    _write_update(row, start, stop)
                elif mark.span.kind == "reduce":
                    row[start:stop] = "+" * (stop - start)
                else:
                    row[start:stop] = _cell(mark, stop - start)
            strips.append(Strip(rank, stage, "".join(row)))
    return tuple(strips)


def _origin(marks: Sequence[Mark]) -> float:
    return min((mark.span.start_seconds for mark in marks), default=0.0)


def _column(seconds: float, column_seconds: float) -> int:
    return round(seconds / column_seconds)


def _cell(mark: Mark, columns: int) -> Iterable[str]:
    """Exactly `columns` characters."""
    labels = (mark.label, mark.label.partition("@")[0])
    if mark.span.kind == "forward":
        fitting = (f" {label}".ljust(columns) for label in labels if len(label) + 1 <= columns)
        return next(fitting, "-" * columns)
    start, stop = "{}" if mark.span.kind == "backward weight" else "[]"
    fitting = (f"{start}{label.ljust(columns - 2)}{stop}" for label in labels if len(label) + 2 <= columns)
    return next(fitting, "=" * columns)


def _write_update(row: list[str], start: int, stop: int) -> None:
    """An update that takes no column goes into the gap before the next number, or over the bracket before it."""
    if stop > start:
        row[start:stop] = "U" * (stop - start)
    elif row[start] in " .-" or start == 0:
        row[start] = "U"
    else:
        row[start - 1] = "U"
