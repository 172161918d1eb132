"""The benchmark on one device runs, on a CPU; what it measures is not tested."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark_jobs import prepare_fragile
from penstock.scheduling import METHODS

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from crews import Crew, Failed
from gpu_figures import Missing, Row, line_of, parameters_of, step_flops, tokens_of, with_versions
from gpu_lineup import SIZES, Launch, Size
from gpu_series import Series
from jobs import Language

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command writes; its table is under "text"."""
    folder = tmp_path_factory.mktemp("gpu")
    files = ["--json", str(folder / "gpu.json"), "--save", str(folder / "gpu.txt")]
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--size", "nano", "--ranks", "2", *files]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return {**value, "text": (folder / "gpu.txt").read_text()}


def test_every_contender_has_its_row(told: dict[str, Any]) -> None:
    rows = told["rows"]
    assert [row["name"] for row in rows if "reason" in row] == []
    schedules = [f"penstock {method.name}" for method in METHODS]
    theirs = ["torch looped bfs", "torch interleaved", "torch interleaved zb", "torch zbv"]
    assert [row["name"] for row in rows if row["processes"] == 1] == [
        "plain loop",
        "penstock, one stage",
        *schedules,
        *theirs,
    ]
    schedules.remove("penstock spp")
    assert [row["name"] for row in rows if row["processes"] == 2] == [*schedules, "torch gpipe", "torch 1f1b"]
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert row["share_of_matrix"] > 0
        assert len(row["step_seconds"]) == len(row["plain_seconds"]) == len(row["host_seconds"]) == 2
        assert (row["actions"] > 0) == row["name"].startswith("penstock")
        assert f"{row['name']:24}{row['processes']:>5}{row['ranks']:>6}" in told["text"]


def test_all_train_alike(told: dict[str, Any]) -> None:
    """Microbatches of half the precision add up in some order, so that losses are equal to some digits."""
    rows = told["rows"]
    losses = rows[0]["losses"]
    assert losses[0] > losses[1] > losses[2]
    for row in rows:
        match row["name"]:
            case "penstock 1f1b":
                # It updates within a step.
                assert row["losses"][2] < losses[2]
            case "penstock 2bw":
                assert row["losses"] == pytest.approx([losses[0], losses[0], losses[1]], rel=1e-4)
            case _:
                assert row["losses"] == pytest.approx(losses, rel=1e-4), row["name"]


def test_what_fails_is_a_reason_and_the_others_go_on() -> None:
    size = Size(SIZES["nano"].model, SIZES["nano"].narrow, 2, 1, 16, rounds=1, steps=1)
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


def row(name: str, held: list[int], versions: int = 0, processes: int = 1) -> Row:
    """One without much in it."""
    seconds, host = [2.0, 3.0], [0.5, 0.6, 0.9]
    return Row(
        name,
        processes,
        2,
        4,
        seconds,
        seconds,
        1.0,
        1.0,
        0.5,
        held,
        held,
        versions,
        None,
        host,
        [0.1, 0.3, 0.2],
        10,
        [],
        [1.0],
    )


def test_figures() -> None:
    rows = [row("penstock 1f1b-flush", [100_000_000, 200_000_000])]
    rows += [row("penstock 2bw", [130_000_000, 250_000_000], versions=70_000_000)]
    flush, delayed = with_versions(rows)
    assert isinstance(delayed, Row) and isinstance(flush, Row)
    assert (flush.versions_held, delayed.versions_held) == (None, 80_000_000)
    assert delayed.host_per_action == pytest.approx(0.06)
    # By the median of 0.4, 0.3 and 0.7.
    assert delayed.beyond_plain_per_action == pytest.approx(0.04)
    assert row("penstock gpipe", [1, 1], processes=2).beyond_plain_per_action is None
    words = " ".join(line_of(delayed).split())
    ratios = "1.000 1.000 1.000 50.0%"
    assert words == f"penstock 2bw 1 2 2500.00 2000.00 3000.00 1 {ratios} 250 70 80 60000.0 40000.0 150000.0 - 1.0000"


def test_operations_are_counted_by_the_formula() -> None:
    model = Language(1024, 16, 24, 1024)
    assert tokens_of(SIZES["gpt-350m"]) == 32 * 1024
    # Of a block: four matrices of attention, eight of the perceptron, and 13 rows of biases and norms.
    blocks = 24 * (12 * 1024**2 + 13 * 1024)
    assert parameters_of(model) == 256 * 1024 + 1024**2 + blocks + 2 * 1024 + 256 * 1024
    assert 345e6 < parameters_of(SIZES["gpt-350m"].model) < 360e6
    size = Size(model, model, 1, 2, 16, 1, 1)
    assert step_flops(size) == 2048 * (6 * parameters_of(model) + 12 * 24 * 1024 * 1024)
