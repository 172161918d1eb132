"""The text picture of a schedule or a timeline, like the pipeline figures of the papers, in plain characters.

A schedule contains no times. Its picture is its simulation with forwards and backwards of one unit and instant links,
so the picture shows the program that runs. (The papers draw backwards twice as long; one unit keeps the picture narrow,
and the bubble's share is the same.) Where a schedule splits backwards, each half takes one unit and a whole backward
two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import assert_never

from penstock.arguments import check_arguments, instance, integer
from penstock.errors import ScheduleError, counted
from penstock.rendering.strips import COPIES, LabeledSpan, Strip, draw_strips, label_spans, last_column
from penstock.scheduling.schedules import Schedule
from penstock.simulating.action_costs import Costs
from penstock.simulating.simulator import default_minibatches, execute
from penstock.timelines.timelines import Timeline
from penstock.values.quantities import seconds_text

_PANELS = 4
"""A picture that needs more panels of full width than this is cut short."""
_RANKS = 64
"""Only the first ranks are drawn, up to this many."""
_MICROBATCHES = ("forward", "backward", "backward input", "backward weight")
"""The kinds of spans whose number is a microbatch."""


_RULES = {
    "schedule_or_timeline": instance(
        (Schedule, Timeline),
        "a penstock.Schedule or a penstock.Timeline",
        "make one with penstock.schedule(plan), penstock.simulate(...) or pipe.timeline()",
    ),
    "width": integer(40).but("give a larger width"),
}


def render(schedule_or_timeline: Schedule | Timeline, *, minibatches: int | None = None, width: int = 120) -> str:
    """The picture, at most `width` columns wide; a longer one continues in up to four panels below.

    `minibatches`: how many steps of a schedule are drawn, with the drain; by default `default_minibatches`. It is
    ignored for a timeline. Raises `ScheduleError` if a number is invalid.
    """
    given = check_arguments("render", _RULES, ScheduleError, schedule_or_timeline=schedule_or_timeline, width=width)
    width = given["width"]
    match schedule_or_timeline:
        case Schedule():
            return _render_schedule(schedule_or_timeline, default_minibatches(schedule_or_timeline, minibatches), width)
        case Timeline():
            return _render_timeline(schedule_or_timeline, width)
        case _:
            assert_never(schedule_or_timeline)


def _render_schedule(schedule: Schedule, minibatches: int, width: int) -> str:
    splits = schedule.guarantees.splits
    costs = Costs.unit(schedule.stages, split=splits)
    timeline = execute(schedule.program(minibatches), schedule.shape.placement, costs)
    entries = label_spans(timeline)
    # A slot takes three columns or more, so that nothing after the horizon is drawn.
    horizon = _PANELS * width / 3
    slot = 2 + max(len(entry.label) for entry in entries if entry.span.start_seconds < horizon)
    head = [_title(schedule, minibatches), _bubble(schedule, timeline), *_memory_lines(schedule, entries)]
    layout = _Layout(1 / slot, unit=slot, dot_columns=slot, width=width)
    equal = "forward, input backward and weight backward" if splits else "forward and backward"
    return "\n".join([*head, *_panels(entries, schedule.ranks, layout, f"{equal} drawn equally long")])


def _render_timeline(timeline: Timeline, width: int) -> str:
    whole, steady = f"{timeline.bubble:.1%}", f"{timeline.steady_bubble:.1%}"
    head = [
        f"timeline: {counted(timeline.ranks, 'rank')}, {seconds_text(timeline.seconds)}",
        f"bubble: {whole} of wall time" + ("" if steady == whole else f"; {steady} without fill and drain"),
    ]
    entries = label_spans(timeline)
    lengths = [entry.span.seconds for entry in entries if entry.span.kind == "forward" and entry.span.seconds > 0]
    lengths = lengths or [entry.span.seconds for entry in entries if entry.span.seconds > 0]
    if not lengths:
        return "\n".join([*head, "nothing in it takes any time"])
    head.append(f"busy, rank by rank: {_listed([1 - idle for idle in timeline.idle_shares], '.0%')}")
    # Space for the number in the shortest forward, unless it is so short that it would stretch everything else.
    shortest = max(min(lengths), median(lengths) / 2)
    column_seconds = shortest / (2 + max(len(entry.label) for entry in entries))
    layout = _Layout(column_seconds, unit=1, dot_columns=3, width=width)
    return "\n".join(
        [*head, *_panels(entries, timeline.ranks, layout, f"one column is {seconds_text(column_seconds)}")]
    )


def _title(schedule: Schedule, minibatches: int) -> str:
    parts = [counted(schedule.ranks, "rank"), counted(schedule.microbatches, "microbatch") + " a minibatch"]
    if schedule.stages_per_rank > 1:
        parts.insert(1, f"{schedule.stages_per_rank} stages per rank")
    if schedule.ranks > schedule.placement.length:
        split = " that split microbatches" if schedule.placement.split else ""
        parts.insert(1, f"replicas {schedule.placement.text()}{split}")
    if schedule.vertical_sync:
        parts.append("vertical sync")
    return f"{schedule.name}: {', '.join(parts)}; {counted(minibatches, 'minibatch')} drawn"


def _bubble(schedule: Schedule, timeline: Timeline) -> str:
    if schedule.flushes:
        return f"bubble: {timeline.bubble:.1%} of wall time"
    return (
        f"bubble: {timeline.steady_bubble:.1%} of wall time while the pipe is full; "
        f"{timeline.bubble:.1%} of this picture, with fill and drain"
    )


def _memory_lines(schedule: Schedule, entries: Sequence[LabeledSpan]) -> Iterator[str]:
    """The memory of every rank: the most microbatches in flight in the picture, and the weight versions."""
    if all(entry.span.kind == "forward" for entry in entries):
        return
    held, peaks = [0] * schedule.ranks, [0] * schedule.ranks
    for entry in entries:
        rank = entry.span.rank
        held[rank] += {"forward": 1, "backward": -1, "backward weight": -1}.get(entry.span.kind, 0)
        peaks[rank] = max(peaks[rank], held[rank])
    versions = [max(map(schedule.versions, schedule.stages_of(rank))) for rank in range(schedule.ranks)]
    where = " over its stages" if schedule.stages_per_rank > 1 else ""
    yield f"microbatches in flight{where}, rank by rank: {_listed(peaks)}"
    yield f"weight versions, rank by rank: {_listed(versions)}"


def _legend(entries: Sequence[LabeledSpan], strips: Sequence[Strip], scale: str, width: int) -> list[str]:
    """The meaning of the signs that this picture uses."""
    kinds = {entry.span.kind for entry in entries}
    text = "".join(strip.text for strip in strips)
    number = max((entry.span.number for entry in entries if entry.span.kind in _MICROBATCHES), default=0)
    signs = [f" {number}  forward of microbatch {number}"]
    if "backward input" in kinds:
        whole = "its backward or " if "backward" in kinds else "its "
        signs += [f"[{number}]  {whole}input backward", f"{{{number}}}  its weight backward"]
    elif "backward" in kinds:
        signs += [f"[{number}]  its backward"]
    of = {"fetch": f"fetch of stage {number}", "release": f"release of stage {number}"}
    signs += [f"{COPIES[kind]}{number}  {of.get(kind, f'its {kind}')}" for kind in COPIES if kind in kinds]
    signs += ["U  update"] if "update" in kinds else []
    signs += ["+  sum of gradients"] if "+" in text else []
    signs += [".  idle"] if "." in text else []
    signs += ["- =  too short for a number"] if "-" in text or "=" in text else []
    lines = [signs[0]]
    for sign in (*signs[1:], f"({scale})"):
        longer = f"{lines[-1]}   {sign}"
        lines[-1:] = [longer] if len(longer) <= width else [lines[-1], f" {sign}"]
    old = next((entry for entry in entries if "@" in entry.label), None)
    if old is not None:
        version = old.label.partition("@")[2]
        lines.append(
            f" {old.label}  with weights of version {version}, not its stage's newest; without @, with the newest"
        )
    return lines


@dataclass(frozen=True, slots=True)
class _Layout:
    """The sizes of a picture: seconds per column, columns that stay together (`unit`), and the width of the page."""

    column_seconds: float
    unit: int
    dot_columns: int
    width: int


def _panels(entries: Sequence[LabeledSpan], ranks: int, layout: _Layout, scale: str) -> Iterator[str]:
    """The lines of the strips, broken at multiples of the layout's unit, and those of the legend."""
    unit, whole = layout.unit, ranks
    if ranks > _RANKS:
        ranks, entries = _RANKS, [entry for entry in entries if entry.span.rank < _RANKS]
    units = -(-last_column(entries, layout.column_seconds) // unit)
    labels = _labels(draw_strips(entries, ranks, layout.column_seconds, 0, layout.dot_columns))
    room = max(1, (layout.width - len(labels[0]) - 1) // unit)  # one column is for a last update
    panels = -(-units // room)
    shown = min(panels, _PANELS)
    # Panels of equal length look better than a last one with three columns.
    size = unit * (room if panels > shown else -(-units // shown))
    strips = draw_strips(entries, ranks, layout.column_seconds, min(units * unit, shown * size), layout.dot_columns)
    drawn = min(entry.span.start_seconds for entry in entries) + (len(strips[0].text) - 1) * layout.column_seconds
    for panel in range(shown):
        stop = None if panel == shown - 1 else (panel + 1) * size
        yield ""
        for label, strip in zip(labels, strips, strict=True):
            yield (label + strip.text[panel * size : stop]).rstrip()
    if panels > shown:
        yield from ("", f"... cut short: the first {shown * size / (units * unit):.1%} is drawn")
    if whole > ranks:
        yield from ("", f"... ranks {ranks} to {whole - 1} are not drawn")
    yield ""
    yield from _legend([entry for entry in entries if entry.span.stop_seconds <= drawn], strips, scale, layout.width)


def _labels(strips: Sequence[Strip]) -> list[str]:
    """``rank 0  ``, and the stage where its number is not the rank's."""
    named = any(strip.stage not in (None, strip.rank) or strip.copies for strip in strips)
    widest = max(strip.rank for strip in strips)
    names = ["host" if strip.copies else "" if strip.stage is None else f"stage {strip.stage}" for strip in strips]
    labels = []
    for index, strip in enumerate(strips):
        first = index == 0 or strips[index - 1].rank != strip.rank
        name = f"rank {strip.rank:<{len(str(widest))}}" if first else " " * (5 + len(str(widest)))
        labels.append(f"{name} {names[index]:<{max(map(len, names))}} " if named else f"{name} ")
    return labels


def _listed(values: Sequence[float], format_spec: str = "") -> str:
    """The value of each rank, or their range if there are too many."""
    if len(values) > _RANKS:
        least, most = f"{min(values):{format_spec}}", f"{max(values):{format_spec}}"
        return f"{least} each" if least == most else f"{least} to {most}"
    return " ".join(f"{value:{format_spec}}" for value in values)
