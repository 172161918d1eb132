"""The picture of a plan over a cluster: every device is where it is, and holds what it holds."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.rendering import draw_plan
from penstock.values import Cluster, LayerProfile, Plan, Profile, Stage
from penstock.values.plans import Prediction
from support.sample_timelines import SVG, classes, elements


def profile_of(layers: int, name: str = "layer") -> Profile:
    return Profile(tuple(LayerProfile(f"{name} {i}", 1e-3, 2e-3, 4e6 + i, 8e6, 1e8) for i in range(layers)), 8)


def predicted(*peaks: float) -> Prediction:
    return Prediction(0.1, 800.0, 0.01, peaks, 0.125, "stage 1")


def tenants(picture: str) -> dict[int, ElementTree.Element]:
    """The box of every drawn device by its rank."""
    found = {}
    for group in elements(picture, "g"):
        if group.get("class") == "tenant":
            words = group.findtext(f"{SVG}title") or ""
            found[int(re.findall(r"rank (\d+)", words)[0])] = group
    return found


def words(picture: str) -> list[str]:
    return [element.text or "" for element in elements(picture, "text")]


REPLICATED = Plan(
    (Stage(0, 5, (0, 1)), Stage(5, 8, (2,)), Stage(8, 12, (3,))),
    "pipedream",
    8,
    8,
    predicted=predicted(8e9, 8e9, 17e9, 4e9),
)
SERVERS = Cluster.hierarchical([(2, 12e9), (2, 1.25e9)], 16e9)


def test_every_device_says_what_it_holds() -> None:
    found = tenants(draw_plan(REPLICATED, SERVERS, profile_of(12)))
    titles = {rank: box.findtext(f"{SVG}title") for rank, box in found.items()}

    assert titles == {
        0: "rank 0\nstage 0: layers [0, 5), replica 0 of 2\npeak memory 8 GB, 50% of 16 GB",
        1: "rank 1\nstage 0: layers [0, 5), replica 1 of 2\npeak memory 8 GB, 50% of 16 GB",
        2: "rank 2\nstage 1: layers [5, 8)\npeak memory 17 GB, 106% of 16 GB",
        3: "rank 3\nstage 2: layers [8, 12)\npeak memory 4 GB, 25% of 16 GB",
    }


def test_memory_bars_are_the_predicted_share() -> None:
    found = tenants(draw_plan(REPLICATED, SERVERS))
    bars = {}
    for rank, box in found.items():
        by_class = {rect.get("class"): float(rect.get("width", "")) for rect in box.iter(f"{SVG}rect")}
        name = "over" if "over" in by_class else "full"
        bars[rank] = name, round(by_class[name] / by_class["well"], 2)

    assert bars == {0: ("full", 0.5), 1: ("full", 0.5), 2: ("over", 1.0), 3: ("full", 0.25)}


def test_devices_have_the_colour_of_their_stage() -> None:
    picture = draw_plan(REPLICATED, SERVERS)
    chips = [group.find(f"{SVG}rect") for group in classes(picture, "g", "stage")]
    colours = [chip.get("fill") for chip in chips if chip is not None]
    held = {
        rank: [rect.get("fill") for rect in box.iter(f"{SVG}rect") if rect.get("fill")]
        for rank, box in tenants(picture).items()
    }

    assert len(set(colours)) == 3
    assert held == {0: [colours[0]], 1: [colours[0]], 2: [colours[1]], 3: [colours[2]]}


def test_levels_and_cuts_have_their_numbers() -> None:
    reported = words(draw_plan(REPLICATED, SERVERS, profile_of(12)))

    assert reported.count("2 devices, 12 GB/s between them") == 2
    assert reported.count("2 groups, 1.25 GB/s between them") == 1
    assert "stage 0 \N{MULTIPLICATION SIGN} 2" in reported
    assert {"layers 0\N{EN DASH}4", "layers 5\N{EN DASH}7", "15 ms, 500 MB"} <= set(reported)
    # From either replica of stage 0 over the slow link; from stage 1 to stage 2 over the fast one.
    assert [text for text in reported if text in ("4 MB", "3.2 ms", "333 us")] == ["4 MB", "3.2 ms", "4 MB", "333 us"]
    assert reported[0] == "pipedream: 3 stages, 8 microbatches of 8, 4 of 4 devices"
    assert reported[1] == (
        "predicted: 100 ms a minibatch, 800 samples/s, bubble 12.5% of wall time, peak memory 17 GB, limited by stage 1"
    )


def test_microbatches_of_another_size_are_counted_as_such() -> None:
    plan = Plan.uniform(12, 2, microbatch_size=16)

    assert {"8 MB", "36 ms, 600 MB"} <= set(words(draw_plan(plan, Cluster.uniform(2, 1e9), profile_of(12))))


def test_boxes_lie_within_boxes_and_devices_apart() -> None:
    """Positions, summed over the nested groups: nothing overlaps, and each device is within its server."""
    plan = Plan.uniform(32, 16)
    root = ElementTree.fromstring(draw_plan(plan, Cluster.hierarchical([(4, 1e9), (2, 1e9), (2, 1e8)])))
    levels: list[tuple[float, ...]] = []
    devices: list[tuple[float, ...]] = []

    def walk(element: ElementTree.Element, x: float, y: float) -> None:
        move = re.match(r"translate\(([\d.]+) ([\d.]+)\)", element.get("transform", ""))
        if move:
            x, y = x + float(move[1]), y + float(move[2])
        if element.get("class") in ("level", "device"):
            left, top = x + float(element.get("x", "")), y + float(element.get("y", ""))
            box = left, top, left + float(element.get("width", "")), top + float(element.get("height", ""))
            (levels if element.get("class") == "level" else devices).append(box)
        for child in element:
            walk(child, x, y)

    walk(root, 0.0, 0.0)

    def within(inner: tuple[float, ...], outer: tuple[float, ...]) -> bool:
        return all(a >= b for a, b in zip(inner[:2], outer[:2], strict=True)) and all(
            a <= b for a, b in zip(inner[2:], outer[2:], strict=True)
        )

    assert len(devices) == 16
    assert len(levels) == 1 + 2 + 4
    assert sorted(sum(within(device, level) for device in devices) for level in levels) == [4, 4, 4, 4, 8, 8, 16]
    for index, one in enumerate(devices):
        for other in devices[index + 1 :]:
            assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    assert max(level[2] for level in levels) <= float(root.get("width", ""))
    assert max(level[3] for level in levels) <= float(root.get("height", ""))


def test_unused_devices_are_shown_as_such() -> None:
    picture = draw_plan(Plan.uniform(4, 2), Cluster.uniform(4, 1e9))

    assert sorted(tenants(picture)) == [0, 1, 2, 3]
    assert words(picture).count("not used") == 2


def test_interleaved_devices_show_all_their_stages() -> None:
    found = tenants(draw_plan(Plan.uniform(8, 4, "interleaved", 2, 2), Cluster.uniform(2, 1e9)))

    assert [[text.text for text in found[rank].iter(f"{SVG}text")][1:] for rank in (0, 1)] == [["0", "2"], ["1", "3"]]


def test_matrix_clusters_have_a_heat_map() -> None:
    matrix = [[0.0, 8e9, 1e9], [4e9, 0.0, 1e9], [1e9, 2e9, 0.0]]
    picture = draw_plan(Plan.uniform(6, 3), Cluster.from_matrix(matrix))
    squares = {
        title.text: rect.get("fill")
        for rect in elements(picture, "rect")
        for title in rect.iter(f"{SVG}title")
        if " to rank " in (title.text or "")
    }

    assert squares.keys() == {
        "rank 0 to rank 1: 8 GB/s",
        "rank 0 to rank 2: 1 GB/s",
        "rank 1 to rank 0: 4 GB/s",
        "rank 1 to rank 2: 1 GB/s",
        "rank 2 to rank 0: 1 GB/s",
        "rank 2 to rank 1: 2 GB/s",
    }

    def brightness(name: str) -> int:
        return sum(int((squares[name] or "")[at : at + 2], 16) for at in (1, 3, 5))

    links = ("rank 0 to rank 2: 1 GB/s", "rank 2 to rank 1: 2 GB/s", "rank 1 to rank 0: 4 GB/s")
    levels = [brightness(name) for name in (*links, "rank 0 to rank 1: 8 GB/s")]
    assert levels == sorted(set(levels))


def test_links_without_a_limit_are_drawn() -> None:
    assert "2 devices, any speed between them" in words(draw_plan(Plan.uniform(4, 2), Cluster.uniform(2, float("inf"))))


def trillion() -> tuple[Plan, Cluster]:
    """64 stages of 8-way tensor parallelism, 6 times, on 384 servers."""
    stages = (
        Stage(2 * s, 2 * s + 2, tuple(rank + 512 * k for k in range(6) for rank in range(8 * s, 8 * s + 8)))
        for s in range(64)
    )
    peaks = [60e9 - 5e8 * (rank // 8 % 64) for rank in range(3072)]
    plan = Plan(tuple(stages), "1f1b-flush", 512, 1, predicted=predicted(*peaks), tensor_parallel=8)
    return plan, Cluster.hierarchical([(8, 300e9), (384, 25e9)], 80e9)


def test_equal_servers_of_3072_devices_are_drawn_once() -> None:
    picture = draw_plan(*trillion(), profile_of(128))
    counts = [element.text for element in classes(picture, "text", "copies")]

    assert len(picture) < 300_000
    assert len(tenants(picture)) == 64
    # Each stands for 8 equal devices in a server, and each server for 6.
    assert counts.count("\N{MULTIPLICATION SIGN} 8") == 64
    assert counts.count("\N{MULTIPLICATION SIGN} 6") == 64


def test_64_devices_are_all_drawn_in_a_small_file() -> None:
    plan = Plan(tuple(Stage(s, s + 1, tuple(range(4 * s, 4 * s + 4))) for s in range(16)))
    picture = draw_plan(plan, Cluster.hierarchical([(8, 3e11), (8, 25e9)], 80e9), profile_of(16))

    assert sorted(tenants(picture)) == list(range(64))
    assert len(picture) < 100_000


def test_hostile_names_are_harmless() -> None:
    name = '</title><script>alert("1")</script>&'
    picture = draw_plan(Plan.uniform(4, 2), Cluster.uniform(2, 1e9), profile_of(4, name))

    assert "<script" not in picture
    titles = [group.findtext(f"{SVG}title") for group in classes(picture, "g", "stage")]
    assert titles[0] == f"stage 0: layers [0, 2) on rank 0: {name} 0 to {name} 1"


def test_picture_needs_no_other_file() -> None:
    picture = draw_plan(REPLICATED, SERVERS, profile_of(12))

    assert re.findall(r"https?://[^\s\"]+|href|@import|url\(", picture) == ["http://www.w3.org/2000/svg"]


@pytest.mark.parametrize(
    ("plan", "cluster", "profile", "message"),
    [
        (Plan.uniform(4, 4), Cluster.uniform(2, 1e9), None, "the plan uses rank 3 and the cluster has 2 devices"),
        (Plan.uniform(4, 2), Cluster.uniform(2, 1e9), profile_of(5), "the plan has 4 layers and the profile '' has 5"),
    ],
)
def test_what_does_not_fit_is_refused(plan: Plan, cluster: Cluster, profile: Profile | None, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        draw_plan(plan, cluster, profile)

    assert message in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 3), st.booleans())
def test_every_rank_is_drawn_once_with_its_stage(replicas: list[int], spare: int, matrix: bool) -> None:
    stages, rank = [], 0
    for index, count in enumerate(replicas):
        stages.append(Stage(index, index + 1, tuple(range(rank, rank + count))))
        rank += count
    devices = rank + spare
    links = [[1e9] * devices for _ in range(devices)]
    cluster = Cluster.from_matrix(links) if matrix else Cluster.uniform(devices, 1e9)
    found = tenants(draw_plan(Plan(tuple(stages)), cluster))

    assert sorted(found) == list(range(devices))
    for index, stage in enumerate(stages):
        for rank in stage.ranks:
            assert f"stage {index}:" in (found[rank].findtext(f"{SVG}title") or "")
