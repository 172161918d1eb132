"""The trace file of a timeline: Chrome's JSON format, which chrome://tracing and ui.perfetto.dev open.

Each rank is a process of the trace. Its computation is one track; its transfers, which overlap the computation and each
other, are on as many tracks below as they need, since the events of one track must not overlap. An event is named
``forward 3``: Perfetto ignores the digits when it picks a color, so all forwards look alike. An arrow leads from
every send to its receive. The memory of a rank, where known, is a counter of its process.

Source of the format: "Trace Event Format", Google, sections "Complete Events", "Flow Events" and "Counter Events".
"""

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from pathlib import Path
from typing import Any, TypeAlias

from penstock.arguments import integer, number, text_of
from penstock.errors import ScheduleError
from penstock.timelines.memories import MemoryCurve, RankMemory
from penstock.timelines.spans import Span
from penstock.values.documents import TRACE_KIND, read_json

_MICROSECONDS = 1e6
_COUNTER = "memory (bytes)"
_CONSTANTS = ("weight", "optimizer", "master", "library")
_CURVES = ("activations", "buffers")
_RANK = integer(0, 2**16).but("give the rank as an integer")
_BYTES = number(0, most=2.0**60, unit="bytes").but("give what the rank held")
_OTHERS = ("M", "s", "f")
"""The kinds of events that say nothing beside those of computations, messages and memory."""
_Event: TypeAlias = dict[str, object]
_Placed: TypeAlias = tuple[Span, int]
"""A span and its track."""


def trace_json(rows: Sequence[Sequence[Span]], memory: Sequence[RankMemory], origin: float) -> str:
    """The trace of every rank's spans and memory as JSON text. Its times are microseconds from `origin` (seconds)."""
    events: list[_Event] = []
    placed: list[_Placed] = []
    for rank, row in enumerate(rows):
        events.append(_metadata("process_name", rank, 0, {"name": f"rank {rank}"}))
        events.append(_metadata("process_sort_index", rank, 0, {"sort_index": rank}))
        tracks = [
            *_tracks("compute", (span for span in row if span.computes)),
            *_tracks("communication", (span for span in row if not span.computes)),
        ]
        for track, (name, members) in enumerate(tracks):
            events.append(_metadata("thread_name", rank, track, {"name": name}))
            events.append(_metadata("thread_sort_index", rank, track, {"sort_index": track}))
            events.extend(_event(span, track, origin) for span in members)
            placed.extend((span, track) for span in members)
    events.extend(_flows(placed, origin))
    for rank, held in enumerate(memory):
        events.extend(_counters(held, rank, origin))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _tracks(name: str, spans: Iterable[Span]) -> list[tuple[str, list[Span]]]:
    """Distributes `spans`, sorted by start, over as few tracks as possible: each goes to the first free one."""
    tracks: list[list[Span]] = []
    for span in spans:
        free = next((track for track in tracks if track[-1].stop_seconds <= span.start_seconds), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    return [(name if index == 0 else f"{name} {index + 1}", track) for index, track in enumerate(tracks)]


def _event(span: Span, track: int, origin: float) -> _Event:
    return {
        "name": span.words,
        "cat": _category(span),
        "ph": "X",
        "ts": (span.start_seconds - origin) * _MICROSECONDS,
        "dur": span.seconds * _MICROSECONDS,
        "pid": span.rank,
        "tid": track,
        "args": span.details if span.size_bytes is None else {**span.details, "bytes": span.size_bytes},
    }


def _flows(placed: Iterable[_Placed], origin: float) -> Iterator[_Event]:
    """An arrow for every message with both a send and a receive.

    Between replicas the same message exists several times; its sends and receives are paired in the order in which they
    end, since each receive ends when its own message has arrived.
    """
    sends: dict[tuple[int, int, int, str], deque[_Placed]] = defaultdict(deque)
    receives: list[_Placed] = []
    for span, track in sorted(placed, key=lambda entry: entry[0].stop_seconds):
        if span.kind == "send":
            sends[span.stage, span.reference, span.number, span.topic].append((span, track))
        elif span.kind == "receive":
            receives.append((span, track))
    number = 0
    for receive, track in receives:
        waiting = sends[receive.reference, receive.stage, receive.number, receive.topic]
        if not waiting:
            continue
        send, track = waiting.popleft()
        arrow = {"name": "message", "cat": "message", "id": number}
        number += 1
        # An arrow starts and ends inside its events: at the start of the send and at the end of the wait.
        start, stop = send.start_seconds - origin, receive.stop_seconds - origin
        yield {**arrow, "ph": "s", "ts": start * _MICROSECONDS, "pid": send.rank, "tid": track}
        yield {**arrow, "ph": "f", "bp": "e", "ts": stop * _MICROSECONDS, "pid": receive.rank, "tid": track}


def _counters(held: RankMemory, rank: int, origin: float) -> Iterator[_Event]:
    """The memory of the rank at every time of change, in bytes by kind; the viewer stacks them."""
    sizes = {name: getattr(held, f"{name}_bytes") for name in _CONSTANTS} | dict.fromkeys(_CURVES, 0.0)
    yield _counter(sizes, rank, 0.0)
    changes = merge(*([(at, name, size) for at, size in getattr(held, name)] for name in _CURVES))
    current: float | None = None
    for at, name, size in changes:
        if current is not None and at > current:
            yield _counter(sizes, rank, current - origin)
        current, sizes[name] = at, size
    if current is not None:
        yield _counter(sizes, rank, current - origin)


def _counter(sizes: dict[str, float], rank: int, seconds: float) -> _Event:
    return {"name": _COUNTER, "ph": "C", "ts": seconds * _MICROSECONDS, "pid": rank, "args": dict(sizes)}


def _metadata(name: str, rank: int, track: int, args: dict[str, object]) -> _Event:
    return {"name": name, "ph": "M", "pid": rank, "tid": track, "args": args}


def read_trace(path: str | Path) -> tuple[tuple[Span, ...], int, tuple[RankMemory, ...]]:
    """The spans, the number of ranks and their memory from a file of `trace_json`.

    Raises `ScheduleError` if the file is no trace, or one of another program.
    """
    document = read_json(path, ScheduleError)
    found = document.value.get("traceEvents") if isinstance(document.value, dict) else None
    if not isinstance(found, list):
        raise ScheduleError(
            f"{path}: expected a trace with `traceEvents`, found {document.found(found, TRACE_KIND)}: give a file that "
            "Timeline.save_trace wrote"
        )
    spans: list[Span] = []
    ranks = 0
    memory: dict[int, list[dict[str, Any]]] = defaultdict(list)
    try:
        for event in found:
            rank, kind = _RANK.check("pid", event["pid"], ScheduleError), event["ph"]
            ranks = max(ranks, rank + 1)
            if kind == "X":
                spans.append(_read_span(event, rank))
            elif kind == "C":
                memory[rank].append(event)
            elif kind not in _OTHERS:
                raise ValueError(f"an event of the kind {text_of(kind)}")
        held = tuple(_read_memory(memory[rank]) for rank in range(ranks)) if memory else ()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, ScheduleError) as error:
        raise ScheduleError(
            f"{path}: an event is not as Penstock writes it ({type(error).__name__}: {error}): give a file that "
            "Timeline.save_trace wrote, not one of another program"
        ) from error
    return tuple(spans), max(1, ranks), held


def _read_span(event: dict[str, Any], rank: int) -> Span:
    start, args = event["ts"] / _MICROSECONDS, event["args"]
    size = _BYTES.optional.check("bytes", args.get("bytes"), ScheduleError)
    span = Span(rank, args["action"], start, start + event["dur"] / _MICROSECONDS, size)
    if event["cat"] != (category := _category(span)):
        raise ValueError(f"{span.action} has the category {text_of(event['cat'])} in place of {category}")
    return span


def _category(span: Span) -> str:
    return "compute" if span.computes else "communication"


def _read_memory(events: Sequence[dict[str, Any]]) -> RankMemory:
    first = {"library": 0.0} | events[0]["args"]
    weight, optimizer, master, library = (_BYTES.check(name, first[name], ScheduleError) for name in _CONSTANTS)
    activations, buffers = (_read_curve(events, name) for name in _CURVES)
    return RankMemory(weight, optimizer, master, activations, buffers, library_bytes=library)


def _read_curve(events: Sequence[dict[str, Any]], name: str) -> MemoryCurve:
    """The curve of one kind, without the times at which it does not change."""
    curve = [(event["ts"] / _MICROSECONDS, _BYTES.check(name, event["args"][name], ScheduleError)) for event in events]
    before = [(0.0, 0.0), *curve]
    return tuple(entry for last, entry in zip(before, curve, strict=False) if entry[1] != last[1])
