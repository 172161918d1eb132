"""docs/papers.md names commands and tests that exist, and figures that stand in their records."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import papers_study as study
from support.paths import ROOT

PAGE = ROOT / "docs" / "papers.md"
RECORDS = [ROOT / folder for folder in ("benchmarks/results", "studies/results", "studies/convergence/results")]
SHARED_OPTIONS = (ROOT / "benchmarks" / "measurement" / "reports.py").read_text()


def tables(page: str) -> dict[str, list[list[str]]]:
    """The rows of all tables with the same head, with as many cells as the head."""
    found: dict[str, list[list[str]]] = {}
    lines = [*page.splitlines(), ""]
    for number, line in enumerate(lines):
        if not re.fullmatch(r"---(\|---)+", line):
            continue
        head = [cell.strip() for cell in lines[number - 1].split("|")]
        for row in lines[number + 1 : lines.index("", number)]:
            cells = [cell.strip() for cell in row.split("|")]
            assert len(cells) <= len(head), row
            found.setdefault(" ".join(head), []).append(cells + [""] * (len(head) - len(cells)))
    return found


TABLES = tables(PAGE.read_text())
COMMANDS = TABLES["source command takes"]
CLAIMS = TABLES["claim state paper here source remark"]


def script_of(command: str) -> tuple[Path, list[str]]:
    """The script that a command runs, and its other words."""
    folder = ROOT
    words = shlex.split(command)
    if words[0] == "cd":
        folder, words = ROOT / words[1], words[3:]
    assert words[0] == "python", command
    if words[1] == "-m":
        return folder / f"{words[2].replace('.', '/')}.py", words[3:]
    return folder / words[1], words[2:]


@pytest.mark.parametrize("command", [row[1].strip("`") for row in COMMANDS])
def test_commands_name_scripts_and_options_that_exist(command: str) -> None:
    script, words = script_of(command)
    if script == ROOT / "pytest.py":
        assert [word for word in words if word != "-q" and not (ROOT / word).is_dir()] == []
        return
    text = script.read_text() + SHARED_OPTIONS

    assert [word for word in words if word.startswith("--") and f'add_argument("{word}"' not in text] == []


def test_every_record_has_one_command_and_is_used() -> None:
    linked = [re.findall(r"\[(.*)\]\((.*)\)", row[0])[0] for row in COMMANDS[:-1]]

    assert [(PAGE.parent / place).name for _, place in linked] == [name for name, _ in linked]
    assert {(PAGE.parent / place).resolve().parent for _, place in linked} == set(RECORDS)
    assert {name for name, _ in linked} == {row[4] for row in CLAIMS if not row[4].startswith("`")}


def record_of(source: str) -> str:
    """The text of the record, or of the test's file, which must have the test."""
    if source.startswith("`"):
        place, name = source.strip("`").split("::")
        text = (ROOT / "tests" / place).read_text()
        assert f"\ndef {name}(" in text, source
        return text
    return next(folder / source for folder in RECORDS if (folder / source).exists()).read_text()


def missing_figures(here: str, record: str) -> list[str]:
    figures = [word.strip(",;%x") for word in here.split() if re.search(r"\d", word)]
    return [one for one in figures if not re.search(rf"(?<![\d.]){re.escape(one)}(?!\d|\.\d)", record)]


@pytest.mark.parametrize("row", CLAIMS, ids=[f"{row[0]}, {row[4]}" for row in CLAIMS])
def test_every_figure_stands_in_its_record(row: list[str]) -> None:
    _, state, paper, here, source, remark = row

    assert paper and here
    assert state == "works" or (state == "partly" and remark)
    assert missing_figures(here, record_of(source)) == []


def test_a_figure_that_is_not_in_the_record_is_found() -> None:
    assert missing_figures("1.5, 25 %, 2.35 to 18.53", "1.55 -25% 12.35 18.53,") == ["1.5", "2.35"]


def numbers_of(cell: str) -> list[float] | None:
    """The numbers of a cell that has nothing but numbers and units; percent as fractions."""
    number = r"(\d[\d,]*(?:\.\d+)?(?<!,))x?( %)?"
    if re.fullmatch(r"(to )?([\s,]|" + number + r"|\b(h|s|GB|TB)\b)*", cell) is None:
        return None
    return [float(value.replace(",", "")) / (100 if percent else 1) for value, percent in re.findall(number, cell)]


WITHIN = 0.2
"""The tolerance in the head of the page."""


@pytest.mark.parametrize("row", [row for row in CLAIMS if row[1] == "works"], ids=lambda row: row[0])
def test_what_works_is_near_the_paper(row: list[str]) -> None:
    paper, here = numbers_of(row[2]), numbers_of(row[3])

    assert not row[5].startswith("needs")
    if paper and here and len(paper) == len(here):
        assert here == pytest.approx(paper, rel=WITHIN)


def test_numbers_are_compared_where_cells_have_nothing_else() -> None:
    compared = [row for row in CLAIMS if row[1] == "works" and numbers_of(row[2]) and numbers_of(row[3])]

    assert f"within {WITHIN:.0%}".replace("%", " %") in PAGE.read_text()
    assert len(compared) >= 20
    assert numbers_of("3.7, 5.4 h") == [3.7, 5.4]
    assert numbers_of("to 1,008x 35 %") == [1008, 0.35]
    assert numbers_of("15-1") is numbers_of("below 3 %") is numbers_of("t = 8") is None


def test_most_claims_work_that_lack_neither_hardware_nor_data() -> None:
    possible = [row for row in CLAIMS if row[1] == "works" or not row[5].startswith("needs ")]
    works = [row for row in possible if row[1] == "works"]

    assert "at least 70 % work" in PAGE.read_text().replace("\n", " ").replace("  ", " ")
    assert len(works) >= 0.7 * len(possible)


def test_methods_have_tests_and_other_claims_say_what_is_missing() -> None:
    assert [row for row in TABLES["claim source"] if not record_of(row[1])] == []
    assert all(claim and missing for claim, missing in TABLES["claim missing"])
    assert len(TABLES["claim missing"]) < len(CLAIMS)


@pytest.mark.parametrize(
    "name", ["pipedream-16", "pipedream-17", "figure-2.13", "table-4.2", "figure-4.11", "chapter-4", "llama-3"]
)
def test_simulated_figures_repeat(name: str) -> None:
    sections = (ROOT / "studies" / "results" / "papers.txt").read_text().strip().split("\n\n")
    recorded = {section.splitlines()[0]: section.splitlines()[1:] for section in sections}

    assert [*recorded][1:] == list(study.SECTIONS)
    assert list(study.SECTIONS[name](None)) == recorded[name]


def test_one_command_runs_all_commands(tmp_path: Path) -> None:
    (tmp_path / "data dir").mkdir()
    page = tmp_path / "page.md"
    rows = ["exit 3", "test -d DIR", "echo `not this`"]
    page.write_text(
        "source | command | takes\n---|---|---\n" + "".join(f"x | `{row}` | 1 min\n" for row in rows[:2]) + rows[2]
    )
    command = [sys.executable, str(ROOT / "scripts" / "papers"), str(page)]

    def run(*options: str) -> tuple[int, list[str]]:
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240)
        return done.returncode, [re.sub(r", \d+ s:", ":", line) for line in done.stdout.splitlines()]

    assert run() == (1, ["fail: exit 3", "left out, needs --data: test -d DIR"])
    assert run("--data", str(tmp_path / "data dir")) == (1, ["fail: exit 3", "pass: test -d DIR"])
    page.write_text("x | `true` | 1 min\nx | `test 1` | 1 min, a GPU\n")
    last = "pass: test 1" if shutil.which("nvidia-smi") else "left out, needs a GPU: test 1"
    assert run() == (0, ["pass: true", last])
