"""The page of a timeline: everything in it is from the timeline, and it needs nothing else."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.cli import main
from penstock.timelines.pages import _WORDS
from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline
from penstock.values import Cluster, LayerProfile, Plan, Profile
from support.page_contents import data_of, page_of
from support.sample_timelines import SPANS, large_timeline, shifted, timeline_with_memory

KINDS = {"F": "forward", "B": "backward", "U": "update", "A": "reduce", "S": "send", "R": "receive"}


def body_of(page: str) -> ElementTree.Element:
    """The page without its script and style, which must be well-formed XML."""
    page = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL).removeprefix("<!DOCTYPE html>")
    return ElementTree.fromstring(page)


def read_spans(data: dict, panel: int = 0) -> list[tuple[int, str, float, float, int, int, int]]:  # type: ignore[type-arg]
    """(rank, kind, start, stop, stage, number, reference) of every span, in seconds from the panel's origin."""
    spans = []
    for rank, row in enumerate(data["panels"][panel]["rows"]):
        start = 0
        for index, kind in enumerate(row["kinds"]):
            start += row["starts"][index]
            stage = row["stages"] if isinstance(row["stages"], int) else row["stages"][index]
            stop = start + row["lengths"][index]
            times = start * data["tick"], stop * data["tick"]
            spans.append((rank, kind, *times, stage, row["numbers"][index], row["references"][index]))
    return spans


def test_page_holds_every_span(tmp_path: Path) -> None:
    data = data_of(page_of(tmp_path, timeline_with_memory()))
    found = sorted(read_spans(data))
    expected = sorted(
        (s.rank, s.action[1], s.start_seconds - 1, s.stop_seconds - 1, s.stage, s.number, s.reference) for s in SPANS
    )

    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one[:2] == other[:2]
        assert one[2:4] == pytest.approx(other[2:4], abs=2 * data["tick"])
        assert one[4:] == other[4:]
    assert data["tick"] <= 7.5 / 10_000_000


def test_tied_gradients_and_several_stages_look_different(tmp_path: Path) -> None:
    spans = (Span(0, "0T1>3", 0, 1), Span(0, "3T1<0", 1, 2), Span(0, "3F2@1", 2, 3))
    data = data_of(page_of(tmp_path, Timeline(spans, 1)))

    assert [(kind, stage) for _, kind, _, _, stage, _, _ in read_spans(data)] == [("T", 0), ("t", 3), ("F", 3)]


def test_script_draws_every_kind_of_span(tmp_path: Path) -> None:
    page = page_of(tmp_path, timeline_with_memory())
    colors = re.search(r"const NAMES = {(.*?)};", page)
    waits = re.search(r'row\.waits = sorted\(row, "(\w+)"\)', page)
    assert colors and waits

    assert {*re.findall(r"(\w): ", colors[1]), *waits[1]} == set(_WORDS)


def test_hover_says_what_happens(tmp_path: Path) -> None:
    """The words of the page with a span's numbers in them, as its script fills them in."""
    page = page_of(tmp_path, timeline_with_memory())
    data = data_of(page)
    reported = {}
    for rank, kind, _, _, stage, number, reference in read_spans(data):
        what, where = data["words"][kind]
        reported[rank, kind] = (what + "; " + where).format(stage=stage, number=number, reference=reference)
    sizes = data["panels"][0]["rows"][0]["sizes"]

    assert reported[0, "F"] == "forward of microbatch 0; stage 0, weights of version 0"
    assert reported[0, "A"] == "sum of gradients for version 1; over the replicas of stage 0"
    assert reported[0, "U"] == "update to version 1; stage 0, from gradients at version 0"
    assert reported[1, "S"] == "send microbatch 0 to stage 0; from stage 1"
    assert reported[0, "R"] == "wait for microbatch 0 from stage 1; for stage 0"
    assert dict(zip(data["panels"][0]["rows"][0]["kinds"], sizes, strict=True)) == {
        "F": 0,
        "S": "4.2 MB",
        "R": "4.2 MB",
        "B": 0,
        "A": "1 MB",
        "U": 0,
    }


def test_page_holds_the_memory(tmp_path: Path) -> None:
    timeline = timeline_with_memory()
    data = data_of(page_of(tmp_path, timeline))
    for found, memory in zip(data["panels"][0]["memory"], timeline.memory, strict=True):
        assert (found["peak"], found["held"]) == (memory.peak_bytes, memory.constant_bytes)
        for name in ("activations", "buffers"):
            at, course = 0, []
            for step, size in zip(found[name]["at"], found[name]["bytes"], strict=True):
                at += step
                course.append((at * data["tick"] + 1, size))
            assert course == [pytest.approx(entry, abs=1e-6) for entry in getattr(memory, name)]


def test_bubble_is_written_in_total_and_per_rank(tmp_path: Path) -> None:
    timeline = Timeline((*SPANS, Span(1, "1F1@0", 5.75, 6.75)), 2)
    page = page_of(tmp_path, timeline)
    body = body_of(page)
    rows = [[cell.text for cell in row] for row in body.iter("tr")]

    assert [row["idle"] for row in data_of(page)["panels"][0]["rows"]] == ["56.7%", "43.3%"]
    assert rows == [["rank", "busy", "idle"], ["0", "3.25 s", "56.7%"], ["1", "4.25 s", "43.3%"]]
    assert [line.text for line in body.iter("p") if line.get("class") == "figures"] == [
        "2 ranks, 7.5 s, bubble 50.0% of wall time"
    ]


def test_prediction_and_measurement_share_one_axis(tmp_path: Path) -> None:
    timeline = timeline_with_memory()
    page = page_of(tmp_path, timeline, measured=shifted(timeline, 1e6, 1.25), title="both")
    data = data_of(page)
    lines = [line.text for line in body_of(page).iter("p") if line.get("class") == "figures"]

    assert [panel["name"] for panel in data["panels"]] == ["predicted", "measured"]
    assert [panel["length"] * data["tick"] for panel in data["panels"]] == pytest.approx([7.5, 9.375], abs=1e-5)
    for one, other in zip(read_spans(data, 0), read_spans(data, 1), strict=True):
        assert other[2] == pytest.approx(1.25 * one[2], abs=1e-5)
    assert lines == [
        "predicted: 2 ranks, 7.5 s, bubble 56.7% of wall time, peak memory 8 GB on rank 0",
        "measured: 2 ranks, 9.38 s, bubble 56.7% of wall time",
        "measured takes 25.0% longer than predicted",
    ]


def test_critical_path_is_marked_where_it_is(tmp_path: Path) -> None:
    by_action = {span.action: span for span in SPANS}
    path = [by_action[action] for action in ("0F0@0", "1F0@0", "1B0@0", "0B0@0")]
    page = page_of(tmp_path, Timeline(SPANS, 2), critical=path)
    panel = data_of(page)["panels"][0]

    assert [(rank, panel["rows"][rank]["kinds"][index]) for rank, index in panel["critical"]] == [
        (0, "F"),
        (1, "F"),
        (1, "B"),
        (0, "B"),
    ]
    assert "critical path" in [item[0].tail for item in body_of(page).iter("li")]


def test_legend_leaves_out_what_is_not_there(tmp_path: Path) -> None:
    page = page_of(tmp_path, Timeline((Span(0, "0F0@0", 0, 1),), 1))

    assert [item[0].tail for item in body_of(page).iter("li")] == ["forward", "idle (bubble)"]
    assert not any(button.get("id") == "memory" for button in body_of(page).iter("button"))


def test_lighter_shades_are_explained_where_a_rank_has_several_stages(tmp_path: Path) -> None:
    page = page_of(tmp_path, Timeline((Span(0, "0F0@0", 0, 1), Span(0, "2F0@0", 1, 2)), 1))

    assert "lighter: every other stage of the rank" in [item[-1].tail for item in body_of(page).iter("li")]


def test_page_needs_no_other_file(tmp_path: Path) -> None:
    page = page_of(tmp_path, timeline_with_memory())

    assert re.findall(r"https?:|\bsrc\s*=|\bhref\s*=|@import|url\(|\bfetch\(|XMLHttpRequest", page) == []
    assert "prefers-color-scheme: dark" in page


def test_hostile_titles_are_harmless(tmp_path: Path) -> None:
    title = "</title><script>alert(\"1\")</script> & 'more' \u2028"
    page = page_of(tmp_path, Timeline(SPANS, 2), title=title)

    assert page.count("<script") == 2
    shown = title.replace("\u2028", r"\u2028")
    assert body_of(page).findtext("head/title") == shown
    assert body_of(page).findtext("body/header/h1") == shown


def test_page_is_operable_without_a_mouse(tmp_path: Path) -> None:
    body = body_of(page_of(tmp_path, timeline_with_memory()))
    frame = next(element for element in body.iter("div") if element.get("id") == "frame")

    assert frame.get("tabindex") == "0"
    assert frame.get("aria-label")
    assert any(element.get("role") == "status" for element in body.iter())
    assert all(button.text or button.get("aria-label") for button in body.iter("button"))


def test_every_element_that_the_script_asks_for_is_there(tmp_path: Path) -> None:
    page = page_of(tmp_path, timeline_with_memory())
    found = {element.get("id") for element in body_of(page).iter()} - {None} | {"data"}
    listed = re.search(r"\[([^\]]*)\]\.map\(\(id\)", page)
    buttons = re.search(r"const buttons = \{(.*?)\};", page)
    assert listed is not None
    assert buttons is not None
    asked = set(re.findall(r'getElementById\("(\w+)"\)', page)) | set(re.findall(r'"(\w+)"', listed[1]))

    assert asked | set(re.findall(r"(\w+): ", buttons[1])) <= found


def test_page_of_64_ranks_and_128_microbatches_is_small(tmp_path: Path) -> None:
    timeline = large_timeline(64, 128)
    page = page_of(tmp_path, timeline)

    assert len(timeline.spans) > 30_000
    assert len(page) < 2_500_000
    assert len(read_spans(data_of(page))) == len(timeline.spans)
    # One element for each span would be more than a browser likes.
    assert sum(1 for _ in body_of(page).iter()) < 1_000


def test_timeline_without_time_has_a_page(tmp_path: Path) -> None:
    data = data_of(page_of(tmp_path, Timeline((), 2)))

    assert [panel["length"] for panel in data["panels"]] == [0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with plan.yaml, profile.json and cluster.yaml."""
    monkeypatch.chdir(tmp_path)
    layers = tuple(LayerProfile(f"layer {index}", 1e-3, 2e-3, 4e6, 8e6, 1e6) for index in range(4))
    Profile(layers, 8, "four").save("profile.json")
    Cluster.uniform(2, 1e9, 16e9).save("cluster.yaml")
    Plan.uniform(4, 2, microbatches=3).save("plan.yaml")
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out


def test_show_writes_all_pictures_of_a_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("--svg", "a.svg", "--html", "a.html", "--trace", "a.json", "--map", "b.svg")
    text = shown(capsys, "plan.yaml", "profile.json", "cluster.yaml", *files)

    assert text.endswith("wrote a.svg\nwrote a.html\nwrote a.json\nwrote b.svg\n")
    assert "timeline: 2 ranks" in text
    assert len(read_spans(data_of((here / "a.html").read_text()))) == len(Timeline.load_trace("a.json").spans)
    assert "stage 1" in (here / "b.svg").read_text()
    assert (here / "a.svg").read_text().startswith("<svg")


def test_show_draws_a_trace_and_sets_it_below_a_prediction(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, "plan.yaml", "profile.json", "cluster.yaml", "--trace", "a.json")
    alone = shown(capsys, "a.json", "--html", "a.html")
    both = shown(capsys, "plan.yaml", "profile.json", "cluster.yaml", "--measured", "a.json", "--html", "both.html")
    numbers = json.loads(shown(capsys, "a.json", "--json"))

    assert alone.startswith("timeline: 2 ranks")
    assert "\n\npredicted\ntimeline: 2 ranks" in both
    assert "\n\nmeasured\ntimeline: 2 ranks" in both
    assert [panel["name"] for panel in data_of((here / "both.html").read_text())["panels"]] == ["predicted", "measured"]
    assert "measured takes 0.0% " in (here / "both.html").read_text()
    assert numbers["ranks"] == 2
    assert numbers["bubble"] == pytest.approx(Timeline.load_trace("a.json").bubble)


def test_show_draws_a_plan_without_a_profile_in_equal_steps(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, "plan.yaml", "--html", "a.html")
    page = (here / "a.html").read_text()
    lengths = {
        round(stop - start, 6) for _, kind, start, stop, *_ in read_spans(data_of(page)) if KINDS[kind][-4:] == "ward"
    }

    assert lengths == {1.0}
    assert "forward and backward drawn equally long" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cluster.yaml", "--svg", "x"), "cluster.yaml is a cluster: expected no --svg with it, found x"),
        (("profile.json", "plan.yaml"), "profile.json is a profile: expected no PROFILE with it, found plan.yaml"),
        (("plan.yaml", "--measured", "x"), "--measured x: expected a profile to predict the plan's timeline with"),
    ],
)
def test_show_refuses_what_it_cannot_draw(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["show", *arguments]) != 0
    assert message in capsys.readouterr().err
