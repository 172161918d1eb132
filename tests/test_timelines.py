"""Timelines: what they count as idle, what they refuse, and the two files that they write."""

import json
import math
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.scheduling.actions import parse
from penstock.values.memories import RankMemory
from penstock.values.quantities import seconds_text
from penstock.values.spans import Span
from penstock.values.timelines import Timeline

# Two stages, one microbatch; the transfers take 0.5 s each.
SPANS = (
    Span(0, "0F0@0", 1.0, 2.0),
    Span(0, "0S0>1", 2.0, 2.5),
    Span(0, "0R0<1", 2.0, 6.0),
    Span(0, "0B0@0", 6.0, 8.0),
    Span(0, "0U1<0", 8.0, 8.25),
    Span(1, "1R0<0", 1.0, 2.5),
    Span(1, "1F0@0", 2.5, 3.5),
    Span(1, "1B0@0", 3.5, 5.5),
    Span(1, "1S0>0", 5.5, 6.0),
    Span(1, "1U1<0", 5.5, 5.75),
)


def test_seconds_busy_and_bubble() -> None:
    timeline = Timeline(SPANS, 2)

    assert timeline.seconds == 7.25
    assert [timeline.busy_seconds(rank) for rank in range(2)] == [3.25, 3.25]
    assert timeline.bubble == 1 - 6.5 / (2 * 7.25)
    assert repr(timeline) == "Timeline(2 ranks, 10 spans, 7.25 seconds, bubble 55.2%)"


def test_order_of_spans_and_origin_of_time_do_not_matter() -> None:
    later = tuple(Span(s.rank, s.action, s.start_seconds + 64, s.stop_seconds + 64) for s in reversed(SPANS))

    assert Timeline(later, 2).bubble == Timeline(SPANS, 2).bubble


def test_empty_timeline_has_no_time_and_no_bubble(tmp_path: Path) -> None:
    timeline = Timeline((), 3)
    timeline.save_svg(tmp_path / "empty.svg")
    timeline.save_trace(tmp_path / "empty.json")

    assert (timeline.seconds, timeline.bubble, timeline.steady_bubble, timeline.busy_seconds(2)) == (0, 0, 0, 0)


def test_steady_bubble_leaves_out_fill_and_drain() -> None:
    # Rank 0 retires from second 2 and admits until second 6; there rank 1 idles for one of four seconds.
    spans = (
        *(Span(0, f"0F{k}@0", 2.0 * k, 2.0 * k + (2 if k == 0 else 1)) for k in range(3)),
        Span(0, "0F3@0", 5.5, 6.0),
        *(Span(0, f"0B{k}@0", 2.0 * k + 3, 2.0 * k + 4) for k in (0, 2)),
        Span(0, "0B1@0", 5.0, 5.5),
        Span(1, "1F0@0", 1.0, 4.0),
        Span(1, "1F1@0", 5.0, 9.0),
    )
    timeline = Timeline(spans, 2)

    # The window is 3 to 6: rank 0 is busy throughout, rank 1 for 2 of 3 seconds.
    assert timeline.steady_bubble == pytest.approx(1 - 5 / 6, abs=1e-15)


def test_steady_bubble_is_the_bubble_where_nothing_is_steady() -> None:
    timeline = Timeline(SPANS, 2)

    assert timeline.steady_bubble == timeline.bubble


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 6)), max_size=12))
def test_bubble_equals_counting_ticks(spans: list[tuple[int, int, int]]) -> None:
    """Also where computations overlap, as a device's rounded clock may say: they count once."""
    timeline = Timeline(tuple(Span(rank, "0F0@0", start, start + length) for rank, start, length in spans), 3)
    ticks = {(rank, tick) for rank, start, length in spans for tick in range(start, start + length)}
    start = min((start for _, start, _ in spans), default=0)
    total = max((start + length for _, start, length in spans), default=0) - start

    assert timeline.seconds == total
    assert timeline.bubble == (1 - len(ticks) / (3 * total) if total else 0)
    assert [timeline.busy_seconds(rank) for rank in range(3)] == [
        sum(owner == rank for owner, _ in ticks) for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Span(-1, "0F0@0", 0, 1), "span of 0F0@0: expected a rank from 0, found -1"),
        (
            lambda: Span(0, "F0", 0, 1),
            "span of rank 0: expected an action like 2F0@1, 2B0@1, 2U3<1, 2A3, 2S0>3, 3R0<2, 0T1>3 or 3T1<0, found "
            "'F0': pass str(action)",
        ),
        (
            lambda: Span(0, "0F0@0", 2.0, 1.0),
            "span of 0F0@0 on rank 0: expected a finite start and a stop not before it, found 2.0 to 1.0 seconds: "
            "read both from one clock",
        ),
        (
            lambda: Span(0, "0F0@0", 0.0, math.nan),
            "span of 0F0@0 on rank 0: expected a finite start and a stop not before it, found 0.0 to nan seconds: "
            "read both from one clock",
        ),
        (lambda: Timeline((), 0), "timeline: expected at least 1 rank, found 0"),
        (
            lambda: Timeline(SPANS, 2, (RankMemory(1.0, 1.0, 0.0),)),
            "timeline of 2 ranks: expected the memory of each rank or of none, found that of 1: give one "
            "RankMemory for each rank",
        ),
        (
            lambda: Timeline(SPANS, 1),
            "timeline of 1 ranks: the span of 1R0<0 lies on rank 1, expected one of 0 to 0: pass ranks=2 or more",
        ),
    ],
)
def test_what_is_wrong_is_refused(build: object, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build()  # type: ignore[operator]

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("action", "words", "details"),
    [
        ("2F10@1", "forward 10", {"stage": 2, "microbatch": 10, "version": 1}),
        ("2B10@1", "backward 10", {"stage": 2, "microbatch": 10, "version": 1}),
        ("2U3<1", "update 3", {"stage": 2, "version": 3, "gradient_version": 1}),
        ("2S0>3", "send 0 to stage 3", {"stage": 2, "microbatch": 0, "target": 3}),
        ("3R0<2", "receive 0 from stage 2", {"stage": 3, "microbatch": 0, "source": 2}),
        ("0T1>3", "send tied gradients for version 1 to stage 3", {"stage": 0, "version": 1, "target": 3}),
        ("3T1<0", "receive tied gradients for version 1 from stage 0", {"stage": 3, "version": 1, "source": 0}),
    ],
)
def test_span_reads_the_text_form_as_actions_do(action: str, words: str, details: dict[str, int]) -> None:
    span = Span(0, action, 0.0, 1.0)
    fields = parse(action).__dataclass_fields__

    assert span.words == words
    assert span.details == {"action": action, **details}
    assert list(details) == list(fields)
    assert span.computes == (action[1] in "FBU")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (2e-7, "200 ns"), (4.56e-5, "45.6 us"), (0.00123, "1.23 ms"), (0.9996, "1 s"), (72.3, "72.3 s")],
)
def test_seconds_are_readable(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_trace_has_a_process_per_rank_and_tracks_without_overlap(tmp_path: Path) -> None:
    extra = Span(0, "0S1>1", 2.25, 2.75)  # overlaps the other send, so that it needs a track of its own
    Timeline((*SPANS, extra), 2).save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]

    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {
        (0, 0): "compute",
        (0, 1): "communication",
        (0, 2): "communication 2",
        (0, 3): "communication 3",
        (1, 0): "compute",
        (1, 1): "communication",
    }
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(SPANS) + 1
    assert spans[1] == {
        "name": "backward 0",
        "cat": "compute",
        "ph": "X",
        "ts": 5e6,
        "dur": 2e6,
        "pid": 0,
        "tid": 0,
        "args": {"action": "0B0@0", "stage": 0, "microbatch": 0, "version": 0},
    }
    for track in names:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == track)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(own))


def test_svg_shows_every_computation_where_it_is(tmp_path: Path) -> None:
    Timeline(SPANS, 2).save_svg(tmp_path / "timeline.svg")
    root = ElementTree.fromstring((tmp_path / "timeline.svg").read_text())
    space = "{http://www.w3.org/2000/svg}"

    assert root.findtext(f"{space}title") == "2 ranks, 7.25 s, bubble 55.2% of wall time"
    drawn = {}
    for bar in root.iter(f"{space}rect"):
        if (tooltip := bar.findtext(f"{space}title")) is not None and bar.get("class") != "idle":
            drawn[tooltip.partition(" ")[0]] = (bar.get("class"), float(bar.get("x", "")), bar.get("y"), tooltip)
    assert drawn.keys() == {span.action for span in SPANS}
    kind, x, y, tooltip = drawn["0B0@0"]
    pixels = float(drawn["1F0@0"][1] - drawn["0F0@0"][1]) / 1.5
    assert kind == "backward0"
    assert x == pytest.approx(drawn["0F0@0"][1] + 5 * pixels, abs=0.02)
    assert tooltip == "0B0@0  backward 0 of stage 0 with version 0\n2 seconds, from 6 to 8"
    assert [y == drawn[action][2] for action in ("0F0@0", "1F0@0")] == [True, False]
    texts = [text.text for text in root.iter(f"{space}text")]
    assert {"rank 0", "rank 1", "forward", "backward", "1 s", "7 s"} <= set(texts)
    assert texts.count("0") == 5  # two forwards, two backwards, and the start of the axis


def test_svg_shows_updates_that_take_no_time(tmp_path: Path) -> None:
    Timeline((Span(0, "0F0@0", 0, 1), Span(0, "0U1<0", 1, 1)), 1).save_svg(tmp_path / "timeline.svg")

    assert '<rect class="update" x="784.00" y="70" width="2.00"' in (tmp_path / "timeline.svg").read_text()
