"""The benchmarks run and report every contender; what they measure is not tested."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_schedules(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--microbatches", "2", "--repeats", "1", "--steps", "1", "--save", str(tmp_path / "report.txt")]
    command = [*launcher, "benchmarks/schedules.py", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "report.txt").read_text().splitlines()
    rows = {row["name"]: row for row in (json.loads(line) for line in lines if line.startswith("{"))}
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
