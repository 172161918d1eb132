"""``planner="order"`` and the frontier: orders under the memory of devices, and of less or more."""

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

import penstock
from penstock import Cluster, Plan, Profile
from penstock.cli import main
from penstock.simulating import evaluate
from support.paper_plans import GB, language_model

PROFILE = language_model(8)
CLUSTER = Cluster.uniform(2, 12 * GB)


def test_order_is_a_planner() -> None:
    """It takes the memory of the devices, and is as fast as every plan that trains as one device does."""
    short = Profile(PROFILE.layers[-3:], 1)
    needed = max(evaluate(Plan.uniform(3, 2, "1f1b-flush", 3), short, CLUSTER).peak_bytes)
    small = CLUSTER.with_memory(needed)
    found = penstock.plan(short, small, planner="order", microbatches=3)
    other = penstock.plan(short, small, synchronous=True, straight=True, microbatches=3)

    assert found.planner == "order" and found.ranks == 2
    assert found.predicted is not None and other.predicted is not None
    assert found.predicted.minibatch_seconds <= other.predicted.minibatch_seconds
    assert max(found.predicted.peak_bytes) <= needed
    assert found.layer_names[-1] == "head"
    assert "optimal for these stages; bound: " in found.explain()


def test_order_leaves_what_is_fixed() -> None:
    fixed = penstock.plan(PROFILE, CLUSTER, planner="order", microbatches=6, stages=2, whole_backwards=True)

    assert len(fixed.stages) == 2 and not penstock.schedule(fixed).guarantees.splits


@pytest.mark.sampled(0)
def test_a_frontier_gets_faster_with_memory() -> None:
    found = penstock.frontier(PROFILE, CLUSTER, microbatches=6, limits=(0.8, 1.1))
    named = [
        evaluate(Plan.uniform(9, 2, name, 6), PROFILE, CLUSTER) for name in ("gpipe", "1f1b-flush", "spp", "zb-h1")
    ]

    assert all(one.peak_bytes < two.peak_bytes and one.seconds > two.seconds for one, two in pairwise(found.points))
    assert found.points[0].peak_bytes <= 0.8 * found.reference.peak_bytes
    assert any(str(point.plan.schedule) == "found" and point.gap is not None for point in found.points)
    assert found.reference.plan.schedule == "1f1b-flush"
    for outcome in named:
        able = [point for point in found.points if point.peak_bytes <= max(outcome.peak_bytes)]
        assert able and min(point.seconds for point in able) <= outcome.minibatch_seconds * 1.001
    lines = str(found).splitlines()
    assert lines[0].split()[:3] == ["peak", "of", "1f1b-flush"] and len(lines) == 1 + len(found.points)
    assert lines[1].count("#") == 40


def test_a_frontier_leaves_the_state_out_that_is_on_the_host() -> None:
    short = Profile(PROFILE.layers[-2:], 1)
    on_device, on_host = (
        penstock.frontier(short, CLUSTER, microbatches=4, limits=(1.0,), state_on_host=state).reference
        for state in (False, True)
    )
    weights = max(layer.parameter_bytes for layer in short.layers)
    assert on_device.peak_bytes - on_host.peak_bytes == pytest.approx(2 * weights)


def test_the_command_prints_a_frontier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Profile(PROFILE.layers[-2:], 1).save(tmp_path / "profile.json")
    given = ["plan", str(tmp_path / "profile.json"), "--devices", "2", "--bandwidth", "100Gbps", "--microbatches", "4"]

    assert main([*given, "--frontier", "-o", str(tmp_path / "plan.yaml"), "--svg", str(tmp_path / "all.svg")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "of 1f1b-flush" in lines[0]
    assert Plan.load(tmp_path / "plan.yaml.1").microbatches == 4
    assert len(list(tmp_path.glob("plan.yaml.*"))) == len(lines) - 1
    assert main([*given, "--frontier", "--stages", "2"]) == 1
    assert "--frontier and stages: expected one of them at most" in capsys.readouterr().err
    assert main([*given, "--svg", "all.svg"]) == 1
    assert "--svg: expected --frontier with it" in capsys.readouterr().err
    check_picture((tmp_path / "all.svg").read_text(), [line.split() for line in lines[1:]])


def check_picture(text: str, rows: list[list[str]]) -> None:
    """As many dots as rows, from left to right and downwards, each with its row's bytes and seconds in words."""
    root = ElementTree.fromstring(text)
    tag = "{http://www.w3.org/2000/svg}"
    dots = [each for each in root.iter(f"{tag}circle") if each.get("r") == "8"]
    places = [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in dots[::2]]
    words = [each.text or "" for each in root.iter(f"{tag}text")]

    assert len(places) == len(rows)
    assert all(one[0] < two[0] and one[1] < two[1] for one, two in pairwise(places))
    for row in rows:
        assert any(word.startswith(f"{row[0]} {row[1]}, {row[3]} {row[4]}: {row[6]} ") for word in words), row
    assert "prefers-color-scheme: dark" in text
