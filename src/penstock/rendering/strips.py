"""Strips of text: a timeline as one row of characters per rank, time to the right.

Schedules and measurements are drawn alike, with different numbers of columns per second. A rank with several stages has
a row for each of them.

     3       forward of microbatch 3, until the next thing or a dot; `-` where there is no room for the number
    [3]      its backward, or the input backward, from bracket to bracket; `=` where there is no room
    {3}      its weight backward
     3@1     the same with weights of version 1, while the stage has a newer one
    U        update, drawn when it happens: it takes no time, or little
    ++       the sum of the replicas' gradients, where it takes time
    v3~~     in a row of its own, the copy of what was saved of microbatch 3 to the host; ^3~~ back to the device
    ^s3~     the weights of stage 3 come to the device; vs3~ they leave, and their gradients pass to the host
     .       idle (blank where the rank is busy with another of its stages)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline

_HEIGHTS = {"reduce": 0, "update": 2}
"""The order from bottom to top: a sum of gradients may overlap a computation. Everything else is 1."""
COPIES = {"offload": "v", "reload": "^", "fetch": "^s", "release": "vs"}
"""The kinds of copies between a device and its host, and the signs of their directions."""


@dataclass(frozen=True, slots=True)
class LabeledSpan:
    """A computation, a sum of gradients or a copy to or from the host, with the label that is drawn where it fits."""

    span: Span
    label: str
    """The microbatch, and the version if it is not the stage's newest; empty for a sum of gradients."""


@dataclass(frozen=True, slots=True)
class Strip:
    """The row of one stage on one rank, or of its copies; `stage` is None for these, and for an idle rank."""

    rank: int
    stage: int | None
    text: str
    copies: bool = False


def label_spans(timeline: Timeline) -> tuple[LabeledSpan, ...]:
    """The spans of `timeline` to be drawn, by rank and start."""
    newest: dict[tuple[int, int], int] = {}
    entries = []
    own = (
        span for span in timeline.spans if span.computes or span.copies or (span.kind == "reduce" and span.seconds > 0)
    )
    for span in sorted(own, key=lambda span: (span.rank, span.start_seconds, span.stop_seconds)):
        held = span.rank, span.stage  # replicas update one by one
        if span.kind == "update":
            newest[held] = span.number
            entries.append(LabeledSpan(span, "U"))
        elif span.kind == "reduce":
            entries.append(LabeledSpan(span, ""))
        elif span.copies:
            entries.append(LabeledSpan(span, str(span.stage if span.kind in ("fetch", "release") else span.number)))
        else:
            # A measurement may begin in the middle of a run: assume that the version that ran first was the newest.
            newest.setdefault(held, span.reference)
            old = f"@{span.reference}" if span.reference < newest[held] else ""
            entries.append(LabeledSpan(span, f"{span.number}{old}"))
    return tuple(entries)


def last_column(entries: Sequence[LabeledSpan], column_seconds: float) -> int:
    """The number of columns of `entries`, each `column_seconds` wide."""
    origin = _origin(entries)
    return max((_column(entry.span.stop_seconds - origin, column_seconds) for entry in entries), default=0)


def draw_strips(
    entries: Sequence[LabeledSpan], ranks: int, column_seconds: float, columns: int, dot_columns: int
) -> tuple[Strip, ...]:
    """The rows of `entries` in the first `columns` columns and one more, for a last update.

    There is a dot in every `dot_columns` idle columns.
    """
    origin = _origin(entries)
    strips = []
    rows: list[list[LabeledSpan]] = [[] for _ in range(ranks)]
    for entry in entries:
        rows[entry.span.rank].append(entry)
    for rank, own in enumerate(rows):
        # A long run has far more entries than are drawn.
        near = [entry for entry in own if entry.span.start_seconds - origin <= (columns + 1) * column_seconds]
        copies = [entry for entry in near if entry.span.copies]
        held: list[int | None] = [*sorted({entry.span.stage for entry in own})]
        for stage in held or [None]:
            row = ["." if column % dot_columns == 1 else " " for column in range(columns)] + [" "]
            # Later entries are drawn on top: the row's own stage over the blanks, updates over everything.
            rest = (entry for entry in near if not entry.span.copies)
            for entry in sorted(rest, key=lambda entry: (_HEIGHTS.get(entry.span.kind, 1), entry.span.stage == stage)):
                start = _column(entry.span.start_seconds - origin, column_seconds)
                stop = min(_column(entry.span.stop_seconds - origin, column_seconds), columns)
                if start > stop:
                    continue
                if entry.span.stage != stage:
                    row[start:stop] = " " * (stop - start)
                elif entry.span.kind == "update":
                    _write_update(row, start, stop)
                elif entry.span.kind == "reduce":
                    row[start:stop] = "+" * (stop - start)
                else:
                    row[start:stop] = _cell(entry, stop - start)
            strips.append(Strip(rank, stage, "".join(row)))
        if any(entry.span.copies for entry in own):
            row = [" "] * (columns + 1)
            for entry in copies:
                text = COPIES[entry.span.kind] + entry.label
                start = _column(entry.span.start_seconds - origin, column_seconds)
                stop = max(_column(entry.span.stop_seconds - origin, column_seconds), start + len(text))
                row[start:stop] = text.ljust(stop - start, "~")
            strips.append(Strip(rank, None, "".join(row[: columns + 1]), copies=True))
    return tuple(strips)


def _origin(entries: Sequence[LabeledSpan]) -> float:
    return min((entry.span.start_seconds for entry in entries), default=0.0)


def _column(seconds: float, column_seconds: float) -> int:
    return round(seconds / column_seconds)


def _cell(entry: LabeledSpan, columns: int) -> Iterable[str]:
    """Exactly `columns` characters."""
    labels = (entry.label, entry.label.partition("@")[0])
    if entry.span.kind == "forward":
        fitting = (f" {label}".ljust(columns) for label in labels if len(label) + 1 <= columns)
        return next(fitting, "-" * columns)
    start, stop = "{}" if entry.span.kind == "backward weight" else "[]"
    fitting = (f"{start}{label.ljust(columns - 2)}{stop}" for label in labels if len(label) + 2 <= columns)
    return next(fitting, "=" * columns)


def _write_update(row: list[str], start: int, stop: int) -> None:
    """Writes an update; one without a column goes into the gap before the next number, or over the previous bracket."""
    if stop > start:
        row[start:stop] = "U" * (stop - start)
    elif row[start] in " .-" or start == 0:
        row[start] = "U"
    else:
        row[start - 1] = "U"
