"""The playground: its rules in JavaScript are those of the library, and its page works offline."""

import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

import penstock
from penstock.cli import main
from penstock.commands.playground_server import make_server
from penstock.errors import ScheduleError
from penstock.planning.orders.list_orders import ListRule, list_order
from penstock.planning.orders.rows import OrderCosts
from penstock.planning.orders.seeds import find_seeds
from penstock.scheduling import METHODS
from penstock.scheduling.actions import Compute, parse
from penstock.scheduling.lowering import follow_sends, lower
from penstock.scheduling.placements import StageLayout
from penstock.scheduling.schedules import Programs, Schedule
from penstock.scheduling.verification.verifier import enough_minibatches, verify_programs
from penstock.scheduling.written_programs import define_by_programs
from support.paths import ROOT

PAGE = ROOT / "src" / "penstock" / "rendering" / "playground.html"
Rows = list[list[list[Any]]]
"""By rank: actions as [kind, stage, number, version]."""
Call = Callable[..., Any]
BRIDGE = """
globalThis.rules = rules;
globalThis.call = (name, text) => JSON.stringify(rules[name](...JSON.parse(text)) ?? null);
rules.listed = (costs, rule) => rules.listOrder({ ...costs, whole: new Set(costs.whole) }, rule, new Map());
rules.best = (costs) => rules.findRows({ ...costs, whole: new Set(costs.whole) });
"""


@pytest.fixture(scope="module")
def call() -> Call:
    """Calls a function of the page's rules."""
    quickjs = pytest.importorskip("quickjs", reason="the extra `test` brings it")
    script = re.search(r'<script id="rules">\n"use strict";\n(.*?)</script>', PAGE.read_text(), re.DOTALL)
    assert script is not None
    context = quickjs.Context()
    context.eval(script[1] + BRIDGE)
    function = context.get("call")
    return lambda name, *arguments: json.loads(function(name, json.dumps(arguments)))


def words(rows: Rows) -> list[list[str]]:
    return [
        [f"{stage}{kind}{k}{'<' if kind == 'U' else '@'}{version}" for kind, stage, k, version in row] for row in rows
    ]


def drawn(call: Call, draw: random.Random, name: str, most: int) -> tuple[Schedule, dict[str, Any]]:
    """A schedule of the library, and what the page generates for the same pipeline."""
    ranks = draw.randint(2, most)
    microbatches, stages = call("fitted", name, ranks, draw.randint(1, 2 * most), draw.randint(2, 4))
    return Schedule(name, ranks, microbatches, stages), call("generate", name, ranks, microbatches, stages)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", [method.name for method in METHODS])
def test_named_schedules_are_those_of_the_library(call: Call, name: str, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(3):
        schedule, made = drawn(call, draw, name, most=3 + seed // 2)
        steps = 1 if schedule.flushes else enough_minibatches(schedule)
        rows = [[str(each) for each in row if isinstance(each, Compute)] for row in schedule.program(steps)]
        promised = schedule.guarantees

        assert (made["minibatches"], words(made["rows"])) == (steps, rows)
        assert made["versions"] == list(promised.versions)
        assert made["inFlight"] == list(promised.in_flight)
        assert made["pending"] == list(promised.pending_weight_backwards)
        assert made["ofRank"] == list(promised.in_flight_of_rank)
        assert call("prove", made) is None
        assert_times(call, draw, schedule, made)


def assert_times(call: Call, draw: random.Random, schedule: Schedule, made: dict[str, Any]) -> None:
    """The page says when everything happens as the simulator does."""
    forward, backward, weight = (draw.choice([0.5, 1.0, 2.0, 3.0]) for _ in range(3))
    message, each = draw.choice([0.0, 0.25, 1.0, 3.0]), schedule.stages // schedule.ranks
    layer = penstock.LayerProfile(
        "layer", forward / each, (backward + weight) / each, message, 0, 0, weight_seconds=weight / each
    )
    profile = penstock.Profile((layer,) * schedule.stages, microbatch_size=1)
    cluster = penstock.Cluster.uniform(schedule.ranks, bandwidth=1.0)
    timeline = penstock.simulate(schedule, profile, cluster, minibatches=made["minibatches"], split_seconds=0)
    played = call("simulate", made, {"F": forward, "B": backward, "W": weight, "message": message})
    of_ranks: list[list[float]] = [[] for _ in range(schedule.ranks)]
    for span in timeline.spans:
        if isinstance(parse(span.action), Compute):
            of_ranks[span.rank].append(span.start_seconds)

    assert played["total"] == pytest.approx(timeline.seconds)
    assert played["bubble"] == pytest.approx(timeline.bubble)
    for starts, expected in zip(played["starts"], of_ranks, strict=True):
        assert sorted(starts) == pytest.approx(sorted(expected))


def broken(draw: random.Random, rows: Rows) -> Rows:
    """Rows with one or two actions left out, repeated, moved or changed."""
    rows = [list(map(list, row)) for row in rows]
    for _ in range(draw.choice([1, 1, 1, 2])):
        row = draw.choice(rows)
        place = draw.randrange(len(row))
        action = row[place]
        match draw.randrange(6):
            case 0:
                del row[place]
            case 1:
                row.insert(draw.randrange(len(row)), list(action))
            case 2:
                row.insert(draw.randrange(len(row)), row.pop(place))
            case 3:
                row.insert(min(place + 1, len(row)), row.pop(place))
            case 4:
                field = draw.randrange(1, 4)
                action[field] = max(0, action[field] + draw.choice([-1, 1]))
            case _ if action[0] != "U":
                action[0] = draw.choice("FBIW")
    return rows


def complaint(schedule: Schedule, rows: Rows, steps: int) -> str | None:
    """What the verifier says of rows with their messages."""
    actions = [[action for word in row if isinstance(action := parse(word), Compute)] for row in words(rows)]
    programs: Programs = lower(actions, schedule.placement)
    if schedule.definition.layout is not StageLayout.ONE_PER_RANK:
        others = [
            {other: programs[other] for other in range(schedule.ranks) if other != rank}
            for rank in range(schedule.ranks)
        ]
        programs = tuple(
            tuple(follow_sends(row, rank, schedule.placement, others[rank])) for rank, row in enumerate(programs)
        )
    try:
        verify_programs(programs, schedule, steps)
    except ScheduleError as error:
        return str(error)
    return None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(40))
def test_proof_finds_the_same_fault_as_the_verifier(call: Call, seed: int) -> None:
    draw = random.Random(seed)
    found = 0
    for _ in range(200):
        schedule, made = drawn(call, draw, draw.choice(METHODS).name, most=3)
        rows = broken(draw, made["rows"])
        if any(stage >= schedule.stages for row in rows for _, stage, _, _ in row):
            continue
        said, wrong = complaint(schedule, rows, made["minibatches"]), call("prove", {**made, "rows": rows})
        assert (said is None) == (wrong is None), (words(rows), said, wrong)
        if said is not None:
            assert_same_fault(said, wrong, words(rows))
            found += 1
    assert found > 120


def assert_same_fault(said: str, wrong: dict[str, Any], rows: list[list[str]]) -> None:
    law = said.partition("violates an invariant: ")[2].partition("\n")[0]
    marked = re.search(r"\n  rank (\d+):.*>>(.+?)<<", said)
    assert wrong["law"] == law and marked is not None
    if law.startswith("no rank waits"):
        assert wrong["ranks"] == [int(rank) for rank in re.findall(r"^  rank (\d+):", said, flags=re.MULTILINE)]
    elif not re.match(r"\d+R\d+<", marked[2]):  # a message, which the page derives, is of the wrong stage as well
        row = [*rows[wrong["rank"]], "end"]
        expected = re.search(r"\n  expected: (.*)\n  fix: (.*)", said)
        assert expected is not None
        assert (wrong["rank"], row[wrong["index"]]) == (int(marked[1]), marked[2])
        assert (wrong["expected"], wrong["fix"]) == expected.groups()


def pipeline_costs(draw: random.Random) -> tuple[OrderCosts, dict[str, Any]]:
    """Costs of a pipeline for the library and for the page."""
    p, each = draw.randint(2, 4), draw.randint(1, 3)
    folded = each == 2 and draw.random() < 0.7
    held = [[r, 2 * p - 1 - r] if folded else [r + p * turn for turn in range(each)] for r in range(p)]
    ranks = [next(rank for rank, own in enumerate(held) if stage in own) for stage in range(p * each)]
    forward, backward, weight = ([draw.choice([0.5, 1.0, 1.5, 2.0]) for _ in ranks] for _ in range(3))
    late = [0.0 if a == b else draw.choice([0.0, 0.5]) for a, b in pairwise(ranks)]
    limit, m, whole = (
        draw.choice([0.5, 1, 1.5, 2, p, 2 * p]),
        draw.randint(1, 7),
        draw.choice([[0], [*range(p * each)]]),
    )
    saved = [1 / each] * len(ranks)
    delays = tuple(late)
    times = tuple(forward), tuple(backward), tuple(weight)
    costs = OrderCosts(tuple(ranks), m, *times, delays, delays, tuple(saved), (limit,) * p, whole=frozenset(whole))
    own = {"held": held, "m": m, "forward": forward, "backward": backward, "weight": weight, "late": late}
    return costs, {**own, "saved": saved, "limit": limit, "whole": whole}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(12))
def test_list_scheduling_is_that_of_the_library(call: Call, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        costs, own = pipeline_costs(draw)
        ahead = draw.choice([(), tuple(float(draw.randint(1, 3)) for _ in costs.ranks)])
        rule = ListRule(draw.choice([0.0, 0.4, 0.7, 1.0]), draw.choice([0.0, 0.5, 1.0]), ahead)
        expected = list_order(costs, rule, {})
        shares = {"weightShare": rule.weight_share, "forwardShare": rule.forward_share, "ahead": list(ahead) or None}
        rows = None if expected is None else [[["FBW"[kind], stage, k] for kind, stage, k in row] for row in expected]

        assert call("listed", own, shares) == rows
    best = call("best", own)
    assert (best is None) == (costs.limits[0] < 1)
    # The seeds of the library have building blocks and their weight parts put anew, too.
    assert best is None or best["score"] >= find_seeds(costs, [])[0].score


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["1f1b-flush", "interleaved", "zb-v"])
def test_an_order_under_a_limit_is_proved_by_the_library(call: Call, name: str) -> None:
    times, depth = {"F": 1, "B": 1, "W": 1, "message": 0.1}, 1 if name == "1f1b-flush" else 2
    named = call("generate", name, 3, 6, depth)
    found = [call("findOrder", named, times, limit) for limit in (1, 2, 3)]
    steps = [call("simulate", order, times)["total"] for order in found]

    assert call("findOrder", named, times, 0.5) is None
    assert steps == sorted(steps, reverse=True) and steps[-1] <= call("simulate", named, times)["total"] * 1.1
    for limit, order in zip((1, 2, 3), found, strict=True):
        text = "\n".join(" ".join(row) for row in words(order["rows"]))
        schedule = Schedule(define_by_programs("found", text), 3, 6, depth)
        penstock.verify(schedule)
        assert max(schedule.guarantees.in_flight_of_rank) <= limit * depth


def test_the_page_asks_no_host_for_anything() -> None:
    page = PAGE.read_text()

    assert not re.search(r"(?:https?:)?//\w+\.|\bfetch\(|XMLHttpRequest|WebSocket|import\(|<script src|@import", page)
    assert "default-src 'none'" in page
    assert len(page.splitlines()) <= 960


def test_show_serves_the_page_on_this_machine_only(capsys: pytest.CaptureFixture[str]) -> None:
    with make_server(0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with urlopen(f"{address}/", timeout=60) as answer:
            assert (answer.read(), answer.headers["Content-Type"]) == (PAGE.read_bytes(), "text/html; charset=utf-8")
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{address}/../../etc/passwd", timeout=60)
        assert main(["show", "--serve", str(server.server_port)]) == 1
        server.shutdown()

    assert server.server_address[0] == "127.0.0.1"
    assert "expected a free port of 127.0.0.1" in capsys.readouterr().err
    for arguments, found in ((["show"], "neither"), (["show", "plan.yaml", "--serve"], "both")):
        assert main(arguments) == 1
        assert f"expected a file or --serve, found {found}" in capsys.readouterr().err


@pytest.mark.sampled(1)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("fragment", "expected"),
    [
        ("name=zb-v&p=8&m=16", ["zb-v: a step in 515.0 ms", "Proved: every law holds for", ">rank 7<"]),
        (
            "name=1f1b-flush&p=2&m=2&rank1=1F0@0 1B1@0 1F1@0 1B0@0 1U1%3C0",
            [
                "Not proved, rank 1: a stage takes its microbatches in ascending order",
                "<mark>1B1@0</mark>",
                'class="wrong"',
                "1U1&lt;0</pre>",
            ],
        ),
    ],
)
def test_page_in_chromium(fragment: str, expected: list[str], tmp_path: Any) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    command = [browser, *options, "--virtual-time-budget=2000", f"{PAGE.as_uri()}#{fragment}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=240).stdout

    assert [text for text in expected if text not in shown] == []
