"""The rooms of the library, the tests, the benchmarks and the docs stay within the sizes of scripts/budgets."""

import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

COMMAND = [sys.executable, str(ROOT / "scripts" / "budgets")]


def test_every_room_is_within_its_budget() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stdout


def test_a_room_that_is_too_large_and_one_without_a_budget_are_found(tmp_path: Path) -> None:
    for room, lines in (("scan/inner", 5000), ("attic", 1), ("doctor", 1)):
        folder = tmp_path / "src" / "penstock" / room
        folder.mkdir(parents=True)
        (folder / "boxes.py").write_text("x = 0\n" * lines)
    (tmp_path / "README.md").write_text("words")

    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, timeout=240)

    assert done.returncode == 1
    assert [line.split()[0] for line in done.stdout.splitlines() if "too many" in line] == ["scan", "attic"]
