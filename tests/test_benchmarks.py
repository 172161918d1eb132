"""The benchmarks run and report every contender; what they measure is not tested."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run(benchmark: str, report: Path) -> dict[str, Any]:
    """The rows of a short run on two processes, by contender."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--microbatches", "2", "--repeats", "1", "--steps", "1", "--save", str(report)]
    command = [*launcher, f"benchmarks/{benchmark}.py", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    lines = report.read_text().splitlines()
    return {row["name"]: row for row in (json.loads(line) for line in lines if line.startswith("{"))}


def test_overlap(tmp_path: Path) -> None:
    rows = run("overlap", tmp_path / "report.txt")

    assert list(rows) == ["one process", "penstock", "penstock, sum afterwards", "torch DDP"]
    assert rows["penstock, sum afterwards"]["speedup_over_afterwards"] == 1.0
    # Nothing leaves before the backward is over, which is how the comparison is made.
    assert rows["penstock, sum afterwards"]["share_below_backward"] == 0.0
    assert 0.0 <= rows["penstock"]["share_below_backward"] <= 1.0
    assert [name for name in rows if rows[name]["share_below_backward"] is None] == ["one process", "torch DDP"]
    assert all(row["least"] <= row["median"] <= row["most"] for row in rows.values())


def test_schedules(tmp_path: Path) -> None:
    rows = run("schedules", tmp_path / "report.txt")
    alone = rows.pop("one process")
    assert alone["share_of_ideal"] == 1.0
    ours = {name for name in rows if name.startswith("penstock")}
    assert ours == {f"penstock {schedule}" for schedule in ("gpipe", "1f1b-flush", "interleaved", "1f1b", "2bw")}
    assert all(row["least"] <= row["median"] <= row["most"] for row in rows.values())
    assert [name for name in rows if rows[name]["speedup_over_torch"]] == [
        "penstock gpipe",
        "penstock 1f1b-flush",
        "penstock interleaved",
    ]
