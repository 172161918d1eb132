"""The benchmark of scans runs; what it measures is not tested."""

import subprocess
import sys
from pathlib import Path

from support.paths import ROOT


def test_every_contender_has_a_row(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/scan.py", "--lengths", "10", "--widths", "4", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--save", str(tmp_path / "scan.txt")], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "scan.txt").read_text().splitlines()
    for name in (
        *("torch rnn", "loop in Python", "rnn, blelloch", "rnn, chunked", "torch gru", "gru, blelloch", "gru, chunked"),
        *("loop in Python, diagonal", "scan, diagonal", "associative_scan, diagonal"),
    ):
        assert any(row.startswith(f"     10 {name:28}") and row.endswith("x") for row in rows), name
    assert any(row.startswith("     10 estimate: linear") for row in rows)
