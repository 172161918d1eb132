"""Timelines: what they count as idle, what they refuse, and the files that they write."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.scheduling.actions import parse
from penstock.scheduling.schedules import Schedule
from penstock.simulating import simulate
from penstock.timelines.bars import Geometry, draw_row
from penstock.timelines.memories import RankMemory
from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline
from penstock.values import Cluster, LayerProfile, Profile
from support.sample_timelines import SPANS as PICTURED
from support.sample_timelines import classes, elements, large_timeline, shifted, timeline_with_memory

# As in `pictured`, but without the sum of gradients: the update follows the backward.
SPANS = tuple(span for span in (*PICTURED[:4], Span(0, "0U1<0", 8.0, 8.25), *PICTURED[6:]))


def test_seconds_busy_and_bubble() -> None:
    timeline = Timeline(SPANS, 2)

    assert timeline.seconds == 7.25
    assert [timeline.busy_seconds(rank) for rank in range(2)] == [3.25, 3.25]
    assert timeline.bubble == 1 - 6.5 / (2 * 7.25)
    assert repr(timeline) == "Timeline(2 ranks, 10 spans, 7.25 seconds, bubble 55.2%)"


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
    assert sum(timeline.idle_shares) / 3 == pytest.approx(timeline.bubble, abs=1e-12)
    assert [timeline.busy_seconds(rank) for rank in range(3)] == [
        sum(owner == rank for owner, _ in ticks) for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Span(-1, "0F0@0", 0, 1), "span of 0F0@0: expected a rank of 0 or more, found -1: pass the global"),
        (lambda: Span(0, "F0", 0, 1), "span of rank 0: expected an action like 2F0@1, 2B0@1, 2I0@1, 2W0@1, 2U3<1"),
        (lambda: Span(0, "0F0@0", 2.0, 1.0), "span of 0F0@0 on rank 0: expected a finite start and a stop not before"),
        (lambda: Span(0, "0F0@0", 0.0, math.nan), "span of 0F0@0 on rank 0: expected a finite start and a stop not"),
        (lambda: Timeline((), 0), "ranks: expected a whole number, 1 or more, found 0 in a timeline: pass the number"),
        (lambda: Timeline(SPANS, 2, (RankMemory(1.0, 1.0),)), "timeline of 2 ranks: expected the memory of each rank"),
        (lambda: Timeline(SPANS, 1), "timeline of 1 rank: the span of 1R0<0 lies on rank 1, expected one of 0 to 0"),
    ],
)
def test_what_is_wrong_is_refused(build: object, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build()  # type: ignore[operator]

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("action", "words", "details"),
    [
        ("2F10@1", "forward 10", {"stage": 2, "microbatch": 10, "version": 1}),
        ("2B10@1", "backward 10", {"stage": 2, "microbatch": 10, "version": 1}),
        ("2U3<1", "update 3", {"stage": 2, "version": 3, "gradient_version": 1}),
        ("2A3", "sum of gradients for version 3", {"stage": 2, "version": 3}),
        ("2S0>3", "send 0 to stage 3", {"stage": 2, "microbatch": 0, "target": 3}),
        ("3R0<2", "receive 0 from stage 2", {"stage": 3, "microbatch": 0, "source": 2}),
        ("0T1>3", "send tied gradients for version 1 to stage 3", {"stage": 0, "version": 1, "target": 3}),
        ("1N3<2", "receive norms for version 3 from stage 2", {"stage": 1, "version": 3, "source": 2}),
        ("3T1<0", "receive tied gradients for version 1 from stage 0", {"stage": 3, "version": 1, "source": 0}),
        ("2G1", "fetch of weights 1", {"stage": 2, "version": 1}),
        ("2Q1", "release of weights 1", {"stage": 2, "version": 1}),
    ],
)
def test_span_reads_the_text_form_as_actions_do(action: str, words: str, details: dict[str, int]) -> None:
    span = Span(0, action, 0.0, 1.0)
    fields = parse(action).__dataclass_fields__

    assert span.words == words
    assert span.details == {"action": action, **details}
    assert list(details) == list(fields)
    assert span.computes == (action[1] in "FBU")


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


def test_sum_of_gradients_is_no_computation() -> None:
    assert not Span(0, "0A1", 0, 1).computes
    assert Timeline(PICTURED, 2).bubble == 1 - (3.25 + 3.25) / (2 * 7.5)


def test_trace_is_read_back(tmp_path: Path) -> None:
    timeline = timeline_with_memory()
    timeline.save_trace(tmp_path / "trace.json")
    again = Timeline.load_trace(tmp_path / "trace.json")
    key = {(span.rank, span.action): span for span in again.spans}

    assert again.ranks == 2
    assert len(again.spans) == len(timeline.spans)
    for span in timeline.spans:
        found = key[span.rank, span.action]
        assert found.start_seconds == pytest.approx(span.start_seconds - 1, abs=1e-9)
        assert found.stop_seconds == pytest.approx(span.stop_seconds - 1, abs=1e-9)
        assert found.size_bytes == span.size_bytes
    assert again.bubble == pytest.approx(timeline.bubble, abs=1e-12)
    assert [memory.peak_bytes for memory in again.memory] == [memory.peak_bytes for memory in timeline.memory]
    assert again.memory[0].activations == ((0.0, 3e9), (7.0, 0.0))
    assert again.memory[0].buffers == ((4.5, 1e9), (5.0, 0.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected a trace with `traceEvents`, found nothing: give a file that Timeline.save_trace wrote"),
        (
            '{"traceEvents": 3}',
            "expected a trace with `traceEvents`, found 3: give a file that Timeline.save_trace wrote",
        ),
        ('{"traceEvents": [{"ph": "X", "pid": 0, "ts": 1, "dur": 1, "args": {}}]}', "KeyError: 'action'"),
        ('{"traceEvents": [{"ph": "C", "pid": 0, "ts": 1, "args": {"weight": 1}}]}', "KeyError: 'optimizer'"),
    ],
)
def test_another_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.json").write_text(text)

    with pytest.raises(ScheduleError) as caught:
        Timeline.load_trace(tmp_path / "trace.json")

    assert str(caught.value).startswith(f"{tmp_path / 'trace.json'}: ") and message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "key", "value", "message"),
    [
        ("X", "pid", "1e-320", "pid: expected a whole number from 0 to 65536, found 1e-320"),
        ("X", "pid", "1e29", "pid: expected a whole number from 0 to 65536, found 1e+29"),
        ("C", "pid", "-1", "pid: expected a whole number from 0 to 65536, found -1"),
        ("C", "activations", "1e999", "activations: expected a number of bytes from 0 to 1.152921504606847e+18, found"),
        ("C", "weight", "9223372036854775808", "weight: expected a number of bytes from 0"),
        ("C", "optimizer", '"8"', "optimizer: expected a number of bytes from 0"),
        ("X", "ph", '"B"', "ValueError: an event of the kind 'B'"),
        ("C", "ph", "0.5", "ValueError: an event of the kind 0.5"),
        ("X", "cat", "0.5", "has the category 0.5 in place of compute"),
        ("X", "ts", "1e999", "expected a finite start and a stop not before it"),
        ("X", "ts", '"a"', "TypeError"),
    ],
)
def test_a_trace_with_a_wrong_value_is_refused(tmp_path: Path, kind: str, key: str, value: str, message: str) -> None:
    timeline_with_memory().save_trace(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    event = next(event for event in document["traceEvents"] if event["ph"] == kind)
    place = event if key in event else event["args"]
    place[key] = "HERE"
    (tmp_path / "trace.json").write_text(json.dumps(document).replace('"HERE"', value))
    with pytest.raises(ScheduleError) as caught:
        Timeline.load_trace(tmp_path / "trace.json")

    assert str(caught.value).startswith(f"{tmp_path / 'trace.json'}: an event is not as Penstock writes it")
    assert message in str(caught.value)


def test_trace_counts_the_memory_of_every_rank(tmp_path: Path) -> None:
    timeline_with_memory().save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    totals = [
        (event["ts"], sum(event["args"].values())) for event in events if event["ph"] == "C" and event["pid"] == 0
    ]

    assert totals == [(0, 4e9), (0, 7e9), (4.5e6, 8e9), (5e6, 7e9), (7e6, 4e9)]


def test_trace_has_an_arrow_for_every_message(tmp_path: Path) -> None:
    Timeline(SPANS, 2).save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    stops = {event["id"]: event for event in events if event["ph"] == "f"}

    assert starts.keys() == stops.keys()
    arrows = sorted((starts[id]["pid"], starts[id]["ts"], stops[id]["pid"], stops[id]["ts"]) for id in starts)
    assert arrows == [(0, 1e6, 1, 1.5e6), (1, 4.5e6, 0, 5e6)]


def test_svg_marks_what_is_idle(tmp_path: Path) -> None:
    Timeline(SPANS, 2).save_svg(tmp_path / "timeline.svg")
    text = (tmp_path / "timeline.svg").read_text()
    shaded = [element for element in classes(text, "rect", "idle") if len(element)]

    assert [element[0].text for element in shaded] == [f"rank {rank}: idle 55.2% of wall time" for rank in range(2)]
    assert [element.text for element in elements(text, "text")].count("idle 55%") == 2
    # The shade lies behind everything that is done, from the first start to the last stop.
    bars = list(classes(text, "rect", "forward0"))
    pixels = float(bars[1].get("width", "")) + 0.5
    assert float(shaded[0].get("width", "")) == pytest.approx(7.25 * pixels, abs=0.05)


def test_svg_draws_the_memory_below(tmp_path: Path) -> None:
    """The curve's points, read back as seconds and bytes, are those of the timeline."""
    timeline = timeline_with_memory()
    timeline.save_svg(tmp_path / "timeline.svg")
    text = (tmp_path / "timeline.svg").read_text()
    curves = list(classes(text, "path", "memory"))
    held = [element for element in classes(text, "rect", "held") if len(element)]
    forward = next(element for element in classes(text, "rect", "forward0") if len(element))
    left, pixels = float(forward.get("x", "")), float(forward.get("width", "")) + 0.5

    assert len(curves) == len(held) == 2
    for memory, curve, base in zip(timeline.memory, curves, held, strict=True):
        steps = [(float(y), float(x)) for y, x in re.findall(r"V([\d.]+)H([\d.]+)", curve.get("d", ""))]
        foot = float(base.get("y", "")) + float(base.get("height", ""))
        per_byte = float(base.get("height", "")) / 4e9
        drawn = [((x - left) / pixels + 1, (foot - y) / per_byte) for y, x in steps]
        for until, size in drawn:
            now = [held for at, held in memory.total_curve() if at < until - 0.01]
            assert size == pytest.approx(now[-1] if now else 4e9, abs=2e7)
        assert drawn[-1][0] == pytest.approx(8.5, abs=0.01)
    assert curves[0][0].text == (
        "rank 0: peak 8 GB: weights 1 GB, optimizer 2 GB, master weights 1 GB, activations up to 3 GB, "
        "messages and gradients up to 1 GB"
    )


def test_svg_keeps_a_peak_that_is_narrower_than_a_pixel(tmp_path: Path) -> None:
    spike = RankMemory(1.0, 0.0, 0.0, ((500.0, 9.0), (500.001, 0.0)))
    Timeline((Span(0, "0F0@0", 0, 1000),), 1, (spike,)).save_svg(tmp_path / "timeline.svg")
    curve = next(classes((tmp_path / "timeline.svg").read_text(), "path", "memory")).get("d", "")
    levels = [float(y) for y, _ in re.findall(r"V([\d.]+)H([\d.]+)", curve)]

    # Up for a third of a pixel, and down again: all but that third is at the level of the weights.
    assert len(levels) == 3
    assert levels[0] == levels[2] == pytest.approx(max(levels))
    assert levels[0] - levels[1] == pytest.approx(24 * 9 / 10, abs=0.01)


def test_svg_draws_the_measurement_below_the_prediction_on_one_axis(tmp_path: Path) -> None:
    predicted = Timeline(SPANS, 2)
    predicted.save_svg(tmp_path / "both.svg", measured=shifted(predicted, 1e5, 2.0))
    text = (tmp_path / "both.svg").read_text()
    titles = [element.text for element in elements(text, "text") if element.get("class") == "title"]
    first, second = (
        [element for element in classes(text, "rect", "backward0") if len(element)][index] for index in (0, 2)
    )

    assert titles == [
        "predicted: 2 ranks, 7.25 s, bubble 55.2% of wall time",
        "measured: 2 ranks, 14.5 s, bubble 55.2% of wall time",
    ]
    assert float(second.get("x", "")) - 64 == pytest.approx(2 * (float(first.get("x", "")) - 64), abs=0.05)
    assert float(second.get("width", "")) + 0.5 == pytest.approx(2 * (float(first.get("width", "")) + 0.5), abs=0.05)
    assert float(second.get("y", "")) > float(first.get("y", "")) + 42


def test_svg_marks_the_critical_path(tmp_path: Path) -> None:
    """A line over its spans; a wait counts from the end of what it hangs on."""
    by_action = {span.action: span for span in SPANS}
    path = [by_action[action] for action in ("0F0@0", "0S0>1", "1R0<0", "1F0@0", "1B0@0")]
    Timeline(SPANS, 2).save_svg(tmp_path / "timeline.svg", critical=path)
    text = (tmp_path / "timeline.svg").read_text()
    line = next(element for element in classes(text, "path", "critical") if len(element)).get("d", "")
    points = [(float(x), float(stop)) for x, stop in re.findall(r"[ML]([\d.]+) [\d.]+H([\d.]+)", line)]
    pixels = (points[0][1] - points[0][0]) / 1.0

    assert [(round((a - 64) / pixels, 2), round((b - 64) / pixels, 2)) for a, b in points] == [
        (0, 1),
        (1, 1.5),
        (1.5, 1.5),
        (1.5, 2.5),
        (2.5, 4.5),
    ]


def test_svg_of_64_ranks_and_128_microbatches_is_small(tmp_path: Path) -> None:
    timeline = large_timeline(64, 128)
    timeline.save_svg(tmp_path / "large.svg", critical=timeline.spans[:128])
    text = (tmp_path / "large.svg").read_text()
    root = ElementTree.fromstring(text)

    assert len(timeline.spans) > 30_000
    assert len(text) < 1_500_000
    assert float(root.get("width", "")) < 3_000
    # No row and no colour is lost, and rows are apart enough to be read.
    assert len(list(classes(text, "path", "forward0"))) == len(list(classes(text, "path", "backward0"))) == 64
    rows = [
        float(element.get("y", "")) for element in elements(text, "text") if (element.text or "").startswith("rank")
    ]
    assert len(rows) == 64
    assert min(after - before for before, after in pairwise(rows)) >= 18


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 3)), min_size=1, max_size=40))
def test_merging_of_narrow_bars_covers_what_they_cover(lengths: list[tuple[float, float]]) -> None:
    """In a crowded picture the path of a colour covers every bar, and little that is none."""
    spans, at = [], 0.0
    for index, (gap, length) in enumerate(lengths):
        spans.append(Span(0, f"0F{index}@0", at + gap, at + gap + length))
        at += gap + length
    geometry = Geometry(scale=1.0, crowded=True)
    (path,) = draw_row(spans, 0.0, geometry, 10)
    x = 0.0
    pieces = []
    for move, shift, width in re.findall(r"([Mm])?(?:(-?[\d.]+) \d+)?h([\d.]+)v26h-[\d.]+z", path):
        x = float(shift) if move == "M" else x + (float(shift) if move else 0.0)
        pieces.append((x - 64, x - 64 + float(width)))

    for span in spans:
        middle = (span.start_seconds + span.stop_seconds) / 2
        assert any(start - 0.6 <= middle <= stop + 0.6 for start, stop in pieces)
    covered = sum(stop - start for start, stop in pieces)
    assert covered <= sum(span.seconds for span in spans) + 0.6 * len(spans)


def simulated(*seconds: float, cut_bytes: float = 0.0) -> Timeline:
    layers = (LayerProfile(str(index), own, own, cut_bytes, 0, 0) for index, own in enumerate(seconds))
    return simulate(Schedule("gpipe", len(seconds), 4), Profile(tuple(layers), 1), Cluster.uniform(len(seconds), 1.0))


def test_the_slow_stage_and_the_rank_that_waits_for_it_are_named() -> None:
    """Stage 1 takes three seconds where stage 0 takes one: 1 + 4 x 3 forward, and as much back."""
    lines = simulated(1, 3).explain().splitlines()

    assert lines[0].startswith("2 ranks, 26 s.")
    assert lines[1] == "  rank 0 (stage 0): 31%, 69%, 0%; it is idle 0%"
    assert lines[2].startswith("  rank 1 (stage 1): 92%")
    assert lines[3] == "Rank 1 computes longest, 92% of the time."
    assert lines[4].startswith("The longest wait is that of rank 0 for messages from stage 1 to stage 0:")
    assert lines[5].startswith("Stage 1 computes 6 s for a microbatch and the others 2 s on average:")


def test_equal_stages_are_not_blamed() -> None:
    assert "for a microbatch" not in simulated(1, 1, cut_bytes=4).explain()


def test_nothing_needs_no_explanation() -> None:
    assert Timeline((), 1).explain() == "Nothing takes time in this timeline."
