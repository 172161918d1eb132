"""The benchmark on one device runs, on a CPU; what it measures is not tested."""

import json
import math
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import gpu
from contenders.contenders import Entry, one_stage, plain_loop
from contenders.jobs import Language, Placed, Setting, sgd
from gpu_benchmark.devices import MPS, SLICES, Memory, sharing_of
from gpu_benchmark.figures import Missing, Row, parameters_of, step_flops, tokens_of, with_versions
from gpu_benchmark.lineup import SIZES, Launch, Size
from gpu_benchmark.series import Series
from gpu_benchmark.tables import NAME_WIDTH, legend, line_of
from gpu_benchmark.turns import idle_share
from gpu_benchmark.worker_processes import Crew, Failed
from penstock.runtime.transport.backend_selection import SHARED_MEMORY
from penstock.scheduling import METHODS
from penstock.timelines.timelines import Span, Timeline
from support.benchmark_scripts import run_benchmark
from support.jobs.benchmark_jobs import prepare_fragile

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CPU = torch.device("cpu")
VARIANTS = ("", ", clipped", ", 4 samples", ", compiled")
LOOPS = [name + variant for variant in VARIANTS for name in ("plain loop", "penstock, one stage")]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command writes; its table is under "text"."""
    folder = tmp_path_factory.mktemp("gpu")
    files = ["--json", str(folder / "gpu.json"), "--save", str(folder / "gpu.txt")]
    options = ["--device", "cpu", "--size", "nano", "--ranks", "2", *files]
    # The command sets these variables for good. Their old values come back only if the test has set them, too.
    run_benchmark("gpu.py", *options, **{"OMP_NUM_THREADS": "1", SHARED_MEMORY: "0"})
    value: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return {**value, "text": (folder / "gpu.txt").read_text()}


def test_every_contender_has_its_row(reported: dict[str, Any]) -> None:
    rows = reported["rows"]
    assert [row["name"] for row in rows if "reason" in row] == []
    schedules = [f"penstock {method.name}" for method in METHODS]
    theirs = ["torch looped bfs", "torch interleaved", "torch interleaved zb", "torch zbv"]
    assert [row["name"] for row in rows if row["processes"] == 1] == [*LOOPS, *schedules, *theirs]
    assert [row["name"] for row in rows if row["processes"] == 2] == [
        *(f"penstock {name}" for name in ("1f1b-flush", "interleaved", "zb-v", "2bw")),
        "torch gpipe",
        "torch 1f1b",
    ]
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert row["share_of_matrix"] > 0
        assert row["ready_seconds"] > 0
        assert len(row["step_seconds"]) == len(row["plain_seconds"]) == 2
        assert len(row["host_seconds"]) == (0 if row["variant"] in ("compiled", "4 samples") else 2)
        assert (row["actions"] > 0) == row["name"].startswith("penstock")
        assert len(row["idle_shares"]) == (2 if row["name"].startswith("penstock") else 0)
        assert all(0 <= share < 1 for share in row["idle_shares"])
        assert row["sharing"] == (None if row["processes"] == 1 else "cores of a CPU")
        assert f"{row['name']:{NAME_WIDTH}}{row['processes']:>5}{row['ranks']:>6}" in reported["text"]


def test_a_variant_stands_beside_its_own_plain_loop(reported: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in reported["rows"] if row["ranks"] == 1}
    pairs = {name: (row["variant"], row["beside"]) for name, row in rows.items()}
    assert pairs == {
        "plain loop": ("plain", "plain"),
        "penstock, one stage": ("plain", "plain"),
        "plain loop, clipped": ("clipped", "plain"),
        "penstock, one stage, clipped": ("clipped", "clipped"),
        "plain loop, 4 samples": ("4 samples", "plain"),
        "penstock, one stage, 4 samples": ("4 samples", "4 samples"),
        "plain loop, compiled": ("compiled", "plain"),
        "penstock, one stage, compiled": ("compiled", "compiled"),
    }
    # Four microbatches of two samples, or two of four.
    assert {name: row["microbatches"] for name, row in rows.items()} == {
        name: 2 if name.endswith("4 samples") else 4 for name in rows
    }


@pytest.mark.parametrize("entry", [plain_loop(), one_stage()], ids=lambda entry: entry.name)
def test_a_compiled_contender_is_one_graph(entry: Entry) -> None:
    model = SIZES["nano"].model
    setting = Setting(Placed(model, CPU, 2), 1, 2, autocast=torch.bfloat16, compiler="aot_eager")
    eager = entry.build(replace(setting, compiler=None))
    expected = [fmean(map(float, eager.step())) for _ in range(2)]
    eager.close()
    torch._dynamo.reset()
    counters.clear()
    running = entry.build(setting)
    losses = [fmean(map(float, running.step())) for _ in range(2)]
    running.close()

    assert losses == expected
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_clipping_is_the_same_in_a_stage_and_in_the_plain_loop() -> None:
    def weights(entry: Entry, norm: float | None) -> torch.Tensor:
        setting = Setting(Placed(SIZES["nano"].model, CPU, 2), 1, 2, optimizer=sgd, clip_grad_norm=norm)
        running = entry.build(setting)
        running.step()
        running.close()
        return torch.cat([parameter.detach().flatten() for parameter in running.parameters.values()])

    clipped = weights(plain_loop(), 0.1)
    assert torch.equal(weights(one_stage(), 0.1), clipped)
    assert not torch.equal(weights(plain_loop(), None), clipped)


def test_only_those_run_whose_names_match() -> None:
    size = Size(SIZES["nano"].model, SIZES["nano"].narrow, 2, 1, 2, "eager", 16, rounds=1, steps=1)
    launch = Launch(1, 2, ("gpipe", "2bw"), loops=True)
    (row,) = Series(launch, size, CPU, time.monotonic() + 300, re.compile("stage, cl|bw2")).rows()
    assert (row.name, row.processes) == ("penstock, one stage, clipped", 1)

    nothing = Series(launch, size, CPU, time.monotonic() + 300, re.compile("zb"))
    assert list(nothing.rows()) == []
    assert nothing.facts is None, "no process was started"


@pytest.mark.parametrize(
    ("only", "complaint"),
    [("zb-x", "--only zb-x: expected it in one of these names: plain loop; penstock, one stage; "), ("(", "found '('")],
)
def test_an_expression_without_a_match_is_refused(
    only: str, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--size", "nano", "--only", only])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert complaint in capsys.readouterr().err


DAEMON = '#!/bin/sh\nread order && test "$order" = get_server_list && exit {code}\n'


@pytest.mark.parametrize(
    ("pipes", "program", "sharing"),
    [
        (False, DAEMON.format(code=0), SLICES),
        (True, DAEMON.format(code=0), MPS),
        # A daemon that has ended leaves its pipes.
        (True, DAEMON.format(code=1), SLICES),
        # A container has the pipes of its host's daemon, and not its program.
        (True, None, MPS),
    ],
)
def test_processes_share_a_card_by_time_or_under_mps(
    pipes: bool, program: str | None, sharing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "pipes"))
    monkeypatch.setenv("PATH", str(tmp_path))
    if pipes:
        (tmp_path / "pipes").mkdir()
        os.mkfifo(tmp_path / "pipes" / "control")
    if program is not None:
        (tmp_path / "nvidia-cuda-mps-control").write_text(program)
        (tmp_path / "nvidia-cuda-mps-control").chmod(0o755)

    assert sharing_of(torch.device("cuda")) == sharing
    assert ("time slicing" in legend(sharing), "under MPS" in legend(sharing)) == (sharing == SLICES, sharing == MPS)


def test_a_device_is_idle_where_none_of_its_ranks_computes() -> None:
    # Both ranks compute from 2 to 3; a wait is no work, and the last two seconds belong to the step.
    spans = [Span(0, "0F0@0", 0, 3), Span(1, "1R0<0", 1, 2), Span(1, "1F0@0", 2, 6), Span(0, "0R0<1", 3, 10)]
    spans += [Span(0, "0B0@0", 7, 8)]

    assert idle_share(Timeline(tuple(spans), ranks=2)) == pytest.approx(0.3)


def test_memory_is_reported_beyond_what_was_there() -> None:
    assert Memory(5, 7, 20).beyond(Memory(1, 2, 8)) == Memory(4, 5, 12)


def test_all_train_alike(reported: dict[str, Any]) -> None:
    """Microbatches of half the precision add up in some order, so that losses are equal to some digits."""
    rows = reported["rows"]
    losses = rows[0]["losses"]
    assert losses[0] > losses[1] > losses[2]
    for row in rows:
        match row["name"]:
            case "penstock pipedream":
                # It updates within a step.
                assert row["losses"][2] < losses[2]
            case "penstock 2bw":
                assert row["losses"] == pytest.approx([losses[0], losses[0], losses[1]], rel=1e-4)
            case _:
                assert row["losses"] == pytest.approx(losses, rel=1e-4), row["name"]


def test_what_fails_is_a_reason_and_the_others_go_on() -> None:
    size = Size(SIZES["nano"].model, SIZES["nano"].narrow, 2, 1, 2, "eager", 16, rounds=1, steps=1)
    # It wants as many microbatches as stages, and says so where it is built.
    launch = Launch(1, 2, ("interleaved",), ("torch dualpipev", "torch looped bfs"))
    refused, failed, row = Series(launch, size, CPU, time.monotonic() + 300).rows()

    assert isinstance(refused, Missing)
    assert "microbatches" in refused.reason
    assert isinstance(failed, Missing)
    assert failed.reason.startswith("ValueError: ")
    assert isinstance(row, Row)
    assert math.isfinite(row.losses[0])


def test_the_deadline_leaves_out() -> None:
    (row,) = Series(Launch(1, 2, ("gpipe",)), SIZES["nano"], CPU, time.monotonic()).rows()

    assert row == Missing("penstock gpipe", 1, 2, "left out: the deadline had passed")


@pytest.mark.parametrize(
    ("order", "seconds", "reason"),
    [
        ("raise", 60, "ValueError: expected nothing of the kind"),
        ("die", 60, "the process of rank 1 ended with exit code 7"),
        ("hang", 0.1, "no answer from rank 1 within 0 s"),
    ],
)
def test_a_crew_says_why_it_is_no_more(order: str, seconds: float, reason: str) -> None:
    crew = Crew(2, prepare_fragile)
    assert crew.ask("something", 60) == [(0, "something"), (1, "something")]

    with pytest.raises(Failed, match=f"^{reason}$"):
        crew.ask(order, seconds)


def make_row(name: str, held: list[int], versions: int = 0, processes: int = 1) -> Row:
    """One without much in it."""
    seconds = [2.0, 3.0]
    return Row(
        name=name,
        processes=processes,
        sharing=None,
        ranks=2,
        variant="plain",
        beside="plain",
        microbatches=4,
        ready_seconds=5.0,
        step_seconds=seconds,
        plain_seconds=seconds,
        over_plain=1.0,
        tokens_per_second=1.0,
        share_of_matrix=0.5,
        idle_shares=[0.125, 0.25, 0.5],
        peak_bytes=held,
        active_bytes=[bytes_ + 1_000_000 for bytes_ in held],
        reserved_bytes=[bytes_ + 3_000_000 for bytes_ in held],
        held_bytes=held,
        versions_bytes=versions,
        versions_held=None,
        host_seconds=[0.5, 0.6, 0.9],
        plain_host_seconds=[0.1, 0.3, 0.2],
        actions=10,
        sent_bytes=[],
        losses=[1.0],
    )


def test_figures() -> None:
    rows = [make_row("penstock 1f1b-flush", [100_000_000, 200_000_000])]
    rows += [make_row("penstock 2bw", [130_000_000, 250_000_000], versions=70_000_000)]
    flush, delayed = with_versions(rows)
    assert isinstance(delayed, Row) and isinstance(flush, Row)
    assert (flush.versions_held, delayed.versions_held) == (None, 80_000_000)
    assert delayed.host_per_action == pytest.approx(0.06)
    # By the median of 0.4, 0.3 and 0.7.
    assert delayed.beyond_plain_per_action == pytest.approx(0.04)
    assert make_row("penstock gpipe", [1, 1], processes=2).beyond_plain_per_action is None
    words = " ".join(line_of(delayed).split())
    ratios, memory = "plain 1.000 1.000 1.000 50.0% 25.0%", "250 251 253 70 80"
    assert words == f"penstock 2bw 1 2 5.0 2500.00 1 {ratios} {memory} 60000.0 40000.0 150000.0 - 1.0000"
    unmeasured = replace(delayed, host_seconds=[], plain_host_seconds=[])
    assert (unmeasured.host_per_action, unmeasured.beyond_plain_per_action) == (None, None)
    assert line_of(unmeasured).split()[-5:] == ["-", "-", "-", "-", "1.0000"]


def test_operations_are_counted_by_the_formula() -> None:
    model = Language(1024, 16, 24, 1024)
    assert tokens_of(SIZES["gpt-350m"]) == 32 * 1024
    # Of a block: four matrices of attention, eight of the perceptron, and 13 rows of biases and norms.
    blocks = 24 * (12 * 1024**2 + 13 * 1024)
    assert parameters_of(model) == 256 * 1024 + 1024**2 + blocks + 2 * 1024 + 256 * 1024
    assert 345e6 < parameters_of(SIZES["gpt-350m"].model) < 360e6
    size = Size(model, model, 1, 2, 2, "eager", 16, 1, 1)
    assert step_flops(size) == 2048 * (6 * parameters_of(model) + 12 * 24 * 1024 * 1024)
