"""The benchmark of scans runs, and what it recorded agrees with what is estimated."""

import itertools
import re
from pathlib import Path

from penstock.scan import estimate
from support.benchmark_scripts import run_benchmark
from support.paths import ROOT

AT_WORST = 1.25
"""What ``method="auto"`` may take, in times of the fastest method that was measured."""


def test_every_contender_has_a_row(tmp_path: Path) -> None:
    sizes = ("--lengths", "10", "--widths", "4", "--batches", "2")
    run_benchmark("scan.py", *sizes, "--rounds", "1", "--save", str(tmp_path / "scan.txt"))
    rows = (tmp_path / "scan.txt").read_text().splitlines()
    own = [f"{kind}, {method}" for kind in ("rnn", "gru") for method in ("linear", "blelloch", "chunked")]
    for name in (
        *("torch rnn", "loop in Python", "torch gru", *own),
        *("loop in Python, diagonal", "scan, diagonal", "associative_scan, diagonal"),
    ):
        assert any(row.startswith(f"     10 {name:28}") and row.endswith("x") for row in rows), name
    assert sum(row.startswith("     10 auto for") for row in rows) == 2
    assert rows[-1].startswith("auto takes")


def test_every_table_of_the_paper_has_its_sizes(tmp_path: Path) -> None:
    saved = tmp_path / "scan-papers.txt"
    run_benchmark("scan_papers.py", "--longest", "10", "--rounds", "1", "--save", str(saved))
    quick, record = saved.read_text(), (ROOT / "benchmarks/results/scan-papers.txt").read_text()
    heads = [line for line in quick.splitlines() if line.startswith(("table", "LSTM"))]

    assert len(heads) == 1 + 9 + 12 + 4
    assert [head for head in heads if head not in record] == []
    for kind in ("rnn", "gru", "lstm"):
        assert f"torch {kind}" in quick and f"{kind}, blelloch" in quick and f"auto for {kind}" in quick


def recorded() -> dict[tuple[int, int, int, str], dict[str, float]]:
    """By steps, samples, hidden values and kind, the milliseconds of each method's backward that were measured."""
    found: dict[tuple[int, int, int, str], dict[str, float]] = {}
    width = batch = 0
    for row in (ROOT / "benchmarks/results/scan.txt").read_text().splitlines():
        if head := re.match(r"(\d+) hidden values, (\d+) sample", row):
            width, batch = map(int, head.groups())
        if row_of := re.match(r" *(\d+) (?:(torch) (rnn|gru)|(rnn|gru), (\w+)) +[\d.]+ +([\d.]+)", row):
            steps, torch_name, torch_kind, kind, method, milliseconds = row_of.groups()
            key = int(steps), batch, width, torch_kind or kind
            found.setdefault(key, {})[torch_name or method] = float(milliseconds)
    return found


def test_auto_takes_what_was_fastest_or_nearly() -> None:
    """On the CPU that was measured. Estimates follow sizes alone, so this holds or not on every machine alike."""
    cases = recorded()
    lost = {}
    for (steps, batch, width, kind), measured in cases.items():
        predicted = estimate(steps, batch, width, gates=3 if kind == "gru" else 1).seconds
        chosen = min((name for name in predicted if name in measured), key=predicted.__getitem__)
        lost[steps, batch, width, kind] = measured[chosen] / min(measured.values())

    assert len(cases) == 2 * 8 * 4
    assert {key: times for key, times in lost.items() if times > AT_WORST} == {}
    mean = sum(lost.values()) / len(lost)
    sentence = f"takes {mean:.2f} times the time of the fastest method on average over the record, and"
    assert f"{sentence} {max(lost.values()):.2f} times at worst" in (ROOT / "docs/scan.md").read_text()


def rows_of_the_page() -> list[str]:
    """A table of Markdown: times as fast as PyTorch's backward."""
    names = {"linear": '`"linear"`', "blelloch": '`"blelloch"`', "chunked": '`"chunked"`'}
    rows = [
        f"| module | hidden values | samples | length | {' | '.join(names.values())} |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (steps, batch, width, kind), measured in sorted(
        recorded().items(), key=lambda case: (case[0][3], case[0][2], case[0][1], case[0][0])
    ):
        if steps == 1000:
            ratios = [measured["torch"] / measured[name] if name in measured else None for name in names]
            text = " | ".join("" if ratio is None else f"{ratio:.1f}" for ratio in ratios)
            rows.append(f"| {kind.upper()} | {width} | {batch} | {steps:,} | {text} |")
    return rows


def test_the_page_shows_the_record() -> None:
    """The page shows fewer rows than there are, and each as it was measured."""
    head, *rows = rows_of_the_page()
    document = (ROOT / "docs/scan.md").read_text().splitlines()
    begin = document.index(head)
    shown = list(itertools.takewhile(lambda line: line.startswith("|"), document[begin + 1 :]))

    assert {row.split(" |")[0] for row in shown[1:]} == {"| GRU", "| RNN"}
    assert [row for row in shown if row not in rows] == []
