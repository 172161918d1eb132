"""The benchmarks run and report every contender; what they measure is not tested."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def run(benchmark: str, report: Path, *options: str) -> list[dict[str, Any]]:
    """The rows of a short run."""
    command = [sys.executable, f"benchmarks/{benchmark}.py", *options, "--save", str(report)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in report.read_text().splitlines() if line.startswith("{")]


def test_overlap(tmp_path: Path) -> None:
    options = ("--microbatches", "2", "--repeats", "1", "--turn-seconds", "0.01")
    rows = {row["name"]: row for row in run("overlap", tmp_path / "report.txt", *options)}

    assert list(rows) == ["one process", "penstock", "penstock, sum afterwards", "torch DDP"]
    assert rows["penstock, sum afterwards"]["speedup_over_afterwards"] == 1.0
    # Nothing leaves before the backward is over, which is how the comparison is made.
    assert rows["penstock, sum afterwards"]["share_below_backward"] == 0.0
    assert 0.0 <= rows["penstock"]["share_below_backward"] <= 1.0
    assert [name for name in rows if rows[name]["share_below_backward"] is None] == ["one process", "torch DDP"]
    assert all(row["least"] <= row["median"] <= row["most"] for row in rows.values())


def test_throughput(tmp_path: Path) -> None:
    """Every contender steps, and all whose updates are not delayed train alike."""
    options = ("--sizes", "nano", "--microbatches", "4", "--rounds", "1", "--turn-seconds", "0.01", "--no-peaks")
    rows = {row["name"]: row for row in run("throughput", tmp_path / "report.txt", *options)}

    assert all(row["least_seconds"] <= row["median_seconds"] <= row["most_seconds"] for row in rows.values())
    moved = {name: row["distance"] for name, row in rows.items()}
    delayed = {name for name in rows if name.startswith(("penstock 2bw", "penstock 1f1b")) and "flush" not in name}
    assert len(delayed) == 4
    assert len(rows) - len(delayed) > 15
    for name in rows.keys() - delayed:
        assert moved[name] == pytest.approx(moved["one process"], rel=1e-4), name
    assert rows["penstock 1f1b-flush"]["over_peer"] > 0.0


def test_peaks(tmp_path: Path) -> None:
    """What a contender keeps is there: the weights and gradients of its stage, at least."""
    options = ("--sizes", "medium", "--microbatches", "2", "--only", "1f1b-flush")
    quickly = ("--rounds", "1", "--turn-seconds", "0.01")
    rows = {row["name"]: row for row in run("throughput", tmp_path / "report.txt", *options, *quickly)}

    weights = 4 * 8 * (12 * 128**2)
    assert [len(row["peak_bytes"]) for row in rows.values()] == [1, 2, 2]
    assert rows["one process"]["peak_bytes"][0] > 2 * weights
    assert all(peak > weights for name in rows for peak in rows[name]["peak_bytes"])


def test_overhead(tmp_path: Path) -> None:
    options = ("--sizes", "nano", "--microbatches", "2", "--rounds", "1", "--turn-seconds", "0.01", "--repeats", "1")
    rows = run("overhead", tmp_path / "report.txt", *options)

    wholes = [row["name"] for row in rows if "overhead_seconds" in row]
    assert "penstock 1f1b-flush, one process" in wholes
    assert "torch 1f1b" in wholes
    divisions = [row for row in rows if "rank" in row]
    assert [row["rank"] for row in divisions] == [0, 1] * 4
    assert all(row["layers_forward"] > 0 and row["neighbour"] >= 0 and row["message"] >= 0 for row in divisions)


def test_scale(tmp_path: Path) -> None:
    rows = run("scale", tmp_path / "report.txt", "--processes", "2", "--deep", "--devices", "64")

    starts = [row for row in rows if "edges" in row]
    assert {row["equal"] for row in starts} == {True}
    assert {"1f1b-flush", "2bw", "data parallel", "1f1b-flush, two replicas"} <= {row["name"] for row in starts}
    assert all(seconds >= 0 for row in starts for seconds in row["seconds"].values())
    (simulated,) = (row for row in rows if "devices" in row)
    # Of 64 ranks: 64 forwards, 64 backwards and an update each, and a message each way over each of 63 cuts.
    assert simulated["actions"] == 64 * (2 * 64 + 1) + 63 * 64 * 4
