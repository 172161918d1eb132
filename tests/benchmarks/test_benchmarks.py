"""The benchmarks run and report every contender; what they measure is not tested."""

import json
import socket
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import two_schedules
from contenders.jobs import JOBS, Linears, Setting
from measurement.peaks import measure_peaks
from support.benchmark_scripts import run_benchmark
from support.jobs.benchmark_jobs import run_worker
from support.paths import ROOT
from support.processes import Pool

QUICK = 0.01
"""Seconds of a turn."""


def run(pool: Pool, benchmark: str, report: Path, *arguments: Any) -> Any:
    """What the processes of a launch write to `report`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pool.run(2, run_worker, benchmark, port, *arguments)
    return json.loads(report.read_text())


@pytest.mark.sampled(0)
def test_throughput(pool: Pool, tmp_path: Path) -> None:
    """Every contender steps, and all whose updates are not delayed train alike."""
    report = tmp_path / "rounds.json"
    reported = run(pool, "throughput", report, Setting(JOBS["nano"], 2, 4), None, 1, QUICK, report)

    delayed = {name for name in reported["times"] if name.startswith(("penstock 2bw", "penstock pipedream"))}
    delayed -= {name for name in delayed if "flush" in name}
    assert len(delayed) == 4
    assert len(reported["times"]) - len(delayed) > 15
    moved = reported["distances"]
    for name in moved.keys() - delayed:
        assert moved[name] == pytest.approx(moved["one process"], rel=1e-4), name
    assert all(len(times["wall"]) == len(times["processor"]) == 1 for times in reported["times"].values())
    assert len(reported["slowdowns"]) == 1


@pytest.mark.sampled(0)
def test_overhead(pool: Pool, tmp_path: Path) -> None:
    report = tmp_path / "tables.json"
    options = Namespace(sizes=["nano"], microbatches=2, rounds=1, turn_seconds=QUICK, repeats=1, worker=report)
    reported = run(pool, "overhead", report, options)

    names = [row["name"] for row in reported["costs"]]
    assert "penstock 1f1b-flush, one process" in names
    assert "torch 1f1b" in names
    assert [row["rank"] for row in reported["divisions"]] == [0, 1] * 4
    for row in reported["divisions"]:
        assert row["layers_forward"] > 0
        assert row["neighbour"] >= 0
        assert row["message"] >= 0


def test_the_picture_of_two_schedules(pool: Pool) -> None:
    timelines, _ = pool.run(2, two_schedules.measure, "nano", 1)
    drawn = two_schedules.draw(timelines)
    kept = (ROOT / "docs" / "pictures" / "two-schedules.svg").read_text()

    for picture in (drawn, kept):
        titles = [line for line in picture.splitlines() if line.startswith('<text class="title"')]
        assert [title.partition(">")[2].partition(":")[0] for title in titles] == ["1f1b-flush", "zb-v"]
        assert "weight backward" in picture
        assert "prefers-color-scheme: dark" in picture
    assert "benchmarks/two_schedules.py --save docs/pictures/two-schedules.svg" in (ROOT / "README.md").read_text()


def test_scale(pool: Pool, tmp_path: Path) -> None:
    report = tmp_path / "starts.json"
    starts = run(pool, "scale", report, report, False)

    assert {row["equal"] for row in starts} == {True}
    assert {"1f1b-flush", "2bw", "data parallel", "1f1b-flush, two replicas"} <= {row["name"] for row in starts}
    assert all(seconds >= 0 for row in starts for seconds in row["seconds"].values())


@pytest.mark.sampled(0)
@pytest.mark.processes
def test_what_a_contender_keeps_is_in_its_peak() -> None:
    """The weights and the gradients of its stage, at least, and not the processes' own hundreds of megabytes."""
    setting = Setting(Linears(512, 4), 2, 2)
    stage = 4 * 2 * (512**2 + 512)
    peaks = measure_peaks("penstock 1f1b-flush", setting)

    assert len(peaks) == 2
    assert all(2 * stage < peak < 10 * stage for peak in peaks)


@pytest.mark.sampled(0)
@pytest.mark.processes
@pytest.mark.slow
def test_one_command_starts_its_processes_and_prints_rows_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.txt"
    options = ["--sizes", "nano", "--microbatches", "4", "--rounds", "1", "--turn-seconds", str(QUICK), "--no-peaks"]
    run_benchmark("throughput.py", *options, "--only", "gpipe", "--save", str(report))

    text = report.read_text()
    rows = {row["name"]: row for row in (json.loads(line) for line in text.splitlines() if line.startswith("{"))}
    assert list(rows) == ["one process", "torch gpipe", "penstock gpipe", "penstock gpipe, gloo"]
    assert all(row["least_seconds"] <= row["median_seconds"] <= row["most_seconds"] for row in rows.values())
    assert rows["penstock gpipe"]["over_peer"] > 0.0
    assert f" {rows['penstock gpipe']['over_peer']:.2f}x " in text
    assert text in capsys.readouterr().out
