"""The trace file of a timeline: Chrome's JSON format, which chrome://tracing and ui.perfetto.dev open.

Each rank is a process of the trace. Its computation is one track; its transfers, which overlap the computation and each
other, lie on as many tracks below as they need, since the events of one track must not overlap. An event is named
``forward 3``: Perfetto leaves the digits out when it picks a colour, so all forwards look alike.

Source of the format: "Trace Event Format", Google, section "Complete Events".
"""

import json
from collections.abc import Iterable, Sequence

from penstock.values.spans import Span

__all__ = ["trace_json"]

_MICROSECONDS = 1e6


def trace_json(spans: Sequence[Span], ranks: int) -> str:
    """The trace of `spans` as JSON text. Times in it are microseconds from the first start."""
    origin = min((span.start_seconds for span in spans), default=0.0)
    events: list[dict[str, object]] = []
    for rank in range(ranks):
        events.append(_metadata("process_name", rank, 0, {"name": f"rank {rank}"}))
        events.append(_metadata("process_sort_index", rank, 0, {"sort_index": rank}))
        own = [span for span in spans if span.rank == rank]
        lanes = [
            *_lanes("compute", (span for span in own if span.computes)),
            *_lanes("communication", (span for span in own if not span.computes)),
        ]
        for lane, (name, members) in enumerate(lanes):
            events.append(_metadata("thread_name", rank, lane, {"name": name}))
            events.append(_metadata("thread_sort_index", rank, lane, {"sort_index": lane}))
            events.extend(_event(span, lane, origin) for span in members)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _lanes(name: str, spans: Iterable[Span]) -> list[tuple[str, list[Span]]]:
    """`spans` spread over as few tracks as it takes that none overlap on a track: each goes to the first free one."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_seconds, span.stop_seconds)):
        free = next((lane for lane in lanes if lane[-1].stop_seconds <= span.start_seconds), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return [(name if index == 0 else f"{name} {index + 1}", lane) for index, lane in enumerate(lanes)]


def _event(span: Span, lane: int, origin: float) -> dict[str, object]:
    return {
        "name": span.words,
        "cat": "compute" if span.computes else "communication",
        "ph": "X",
        "ts": (span.start_seconds - origin) * _MICROSECONDS,
        "dur": span.seconds * _MICROSECONDS,
        "pid": span.rank,
        "tid": lane,
        "args": span.details,
    }


def _metadata(name: str, rank: int, lane: int, args: dict[str, object]) -> dict[str, object]:
    return {"name": name, "ph": "M", "pid": rank, "tid": lane, "args": args}
