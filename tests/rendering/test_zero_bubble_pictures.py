"""Backwards in two parts in every picture: both are there, distinguished, and explained."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.commands.descriptions import describe_profile
from penstock.rendering import render
from penstock.scheduling.schedules import Schedule
from penstock.simulating import critical_path, simulate
from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline
from penstock.values import Cluster, LayerProfile, Plan, Profile
from support.page_contents import data_of, page_of


def played(made: Schedule, cut: float = 0.0, bandwidth: float = float("inf")) -> Timeline:
    layer = LayerProfile("", 1.0, 2.0, cut, 1.0, 1.0, weight_seconds=1.0)
    return simulate(made, Profile((layer,) * made.stages, 1), Cluster.uniform(made.ranks, bandwidth), split_seconds=0.0)


def test_picture_without_whole_backwards() -> None:
    timeline = Timeline((Span(0, "1F0@0", 0, 1), Span(0, "1I0@0", 1, 2), Span(0, "1W0@0", 2, 3)), 1)

    assert render(timeline).splitlines()[-3:] == [
        "rank 0 stage 1  0 [0]{0}",
        "",
        " 0  forward of microbatch 0   [0]  its input backward   {0}  its weight backward   (one column is 333 ms)",
    ]


def test_spans_of_the_parts() -> None:
    parts = Span(0, "2I3@1", 0, 1), Span(0, "2W3@1", 1, 2)

    assert [span.kind for span in parts] == ["backward input", "backward weight"]
    assert [span.words for span in parts] == ["input backward 3", "weight backward 3"]
    assert all(span.computes for span in parts)
    assert parts[0].details == {"action": "2I3@1", "stage": 2, "microbatch": 3, "version": 1}


def test_traces_keep_both_parts(tmp_path: Path) -> None:
    timeline = played(Schedule("zb-h1", 2, 2))
    timeline.save_trace(tmp_path / "trace.json")

    assert {span.action for span in Timeline.load_trace(tmp_path / "trace.json").spans} == {
        span.action for span in timeline.spans
    }


def test_svg_has_a_colour_for_weight_parts(tmp_path: Path) -> None:
    for made, parts in ((Schedule("zb-v", 2, 3, 2), True), (Schedule("1f1b-flush", 2, 3), False)):
        played(made).save_svg(tmp_path / "picture.svg")
        text = (tmp_path / "picture.svg").read_text(encoding="utf-8")

        assert ("weight backward" in text) == parts
        assert ('class="weight1"' in text) == parts
        assert ("1I0@0  input backward 0 of stage 1 with version 0" in text) == parts


def test_page_has_both_parts(tmp_path: Path) -> None:
    page = page_of(tmp_path, played(Schedule("zb-h1", 2, 2)))
    data = data_of(page)

    assert data["panels"][0]["rows"][1]["kinds"].count("I") == data["panels"][0]["rows"][1]["kinds"].count("W") == 2
    assert data["words"]["W"][0] == "weight backward of microbatch {number}"
    assert '<span class="swatch weight"></span>weight backward' in page
    assert "weight part" not in page_of(tmp_path, played(Schedule("gpipe", 2, 2))).partition("<script")[0]


def test_show_draws_the_parts_equally_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Plan.uniform(4, 4, "zb-v", 3, 2).save("plan.yaml")

    assert main(["show", "plan.yaml", "--html", "page.html"]) == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert "forward, input backward and weight backward drawn equally long" in page
    assert "bubble 5.3% of wall time" in page


def test_critical_path_leaves_an_input_part_with_its_gradient() -> None:
    """Two stages, slow links: the last stage goes on with a weight part while its gradient travels."""
    timeline = played(Schedule("zb-h1", 2, 1), cut=4.0, bandwidth=1.0)

    assert [span.action for span in critical_path(timeline)] == [
        "0F0@0",
        "0S0>1",
        "1R0<0",
        "1F0@0",
        "1I0@0",
        "1S0>0",
        "0R0<1",
        "0B0@0",
        "0U1<0",
    ]


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_is_held_up_to_the_weight_part(recompute: bool) -> None:
    """Rank 1 of two, one microbatch after the other: 100 bytes saved, an input of 8, gradients of weights of 5."""
    layer = LayerProfile("", 1.0, 2.0, 8.0, 100.0, 5.0, weight_seconds=1.0)
    plan = Plan.uniform(2, 2, "zb-h1", 2, recompute=recompute)
    cluster = Cluster.uniform(2, float("inf"))
    memory = simulate(plan, Profile((layer,) * 2, 1), cluster, split_seconds=0.0).memory[1]

    # F0 1-2, I0 2-3, F1 3-4, I1 4-5, W0 5-6, W1 6-7: each input part follows its forward and has nothing to recompute.
    held = 108.0 if recompute else 100.0
    assert [(round(at, 9), size) for at, size in memory.activations] == [
        (1.0, held),
        (3.0, 2 * held),
        (6.0, held),
        (7.0, 0.0),
    ]
    sums = [(at, size) for at, size in memory.buffers if size == 5.0]
    assert sums == [(6.0, 5.0)]


def test_recomputation_for_an_input_part_is_kept_for_the_weight_part() -> None:
    """Stage 1 of three: inputs of 8 bytes from each forward on, 100 more from recomputation to weight backward."""
    layer = LayerProfile("", 1.0, 2.0, 8.0, 100.0, 5.0, weight_seconds=1.0)
    plan = Plan.uniform(3, 3, "zb-h1", 3, recompute=True)
    timeline = simulate(plan, Profile((layer,) * 3, 1), Cluster.uniform(3, float("inf")), split_seconds=0.0)
    spans = [span for span in timeline.spans if span.rank == 1 and span.computes]
    course = timeline.memory[1].activations
    held = {}
    for span in spans[:-1]:
        middle = (span.start_seconds + span.stop_seconds) / 2
        held[span.action.partition("@")[0]] = [size for at, size in course if at <= middle][-1]

    assert {span.seconds for span in spans if span.kind == "backward input"} == {1.0}
    assert {span.seconds for span in spans if span.kind == "backward weight"} == {1.0}
    assert held == {
        "1F0": 8,
        "1F1": 16,
        "1C0": 116,
        "1I0": 116,
        "1F2": 124,
        "1C1": 224,
        "1I1": 224,
        "1W0": 224,
        "1C2": 216,
        "1I2": 216,
        "1W1": 216,
        "1W2": 108,
    }


def test_a_profile_shows_weight_parts_where_they_were_measured() -> None:
    layer = LayerProfile("h", 1.0, 2.0, 1e6, 1e6, 1e6)

    assert "weight part" not in describe_profile(Profile((layer,), 1))
    assert describe_profile(Profile((layer, replace(layer, weight_seconds=0.5)), 1, "gpt")) == (
        "profile of gpt: 2 layers, microbatches of 1 sample\n"
        "   layer  forward  backward  its weight part   cut  saved  parameters  workspace\n"
        "0  h          1 s       2 s              1 s  1 MB   1 MB        1 MB          0\n"
        "1  h          1 s       2 s           500 ms  1 MB   1 MB        1 MB          0\n"
        "   sum        2 s       4 s            1.5 s         2 MB        2 MB"
    )
