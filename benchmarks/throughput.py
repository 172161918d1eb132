"""Times every way to train the same model beside the others: one process, DDP, torch's schedules, Penstock's schedules.

    python benchmarks/throughput.py

starts its own processes: for every size one launch, in which all contenders take turns, and then fresh processes for
every contender, in which its memory is measured. It prints one JSON line per contender, and a table with the ratios.
What the figures mean stands in benchmarks/README.md. Leave the machine alone meanwhile.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from contenders.contenders import Absent, Entry
from contenders.jobs import JOBS, Setting
from contenders.lineup import entries_of
from measurement.comparisons import LEGEND, Row, rows_of, table
from measurement.launches import launch_and_read
from measurement.peaks import measure_peaks
from measurement.reports import Report, conditions, option_parser
from measurement.rounds import TURN_SECONDS, Rounds, Times, joined, measure


def chosen(setting: Setting, words: list[str] | None) -> tuple[list[Entry], list[Absent]]:
    """The contenders whose names have one of `words` in them (None takes all), and those that do not fit. The plain
    loop is always there.
    """
    found = entries_of(setting)
    wanted = [one for one in found if words is None or one is found[0] or any(word in one.name for word in words)]
    return ([one for one in wanted if isinstance(one, Entry)], [one for one in wanted if isinstance(one, Absent)])


def work(setting: Setting, words: list[str] | None, rounds: int, turn_seconds: float, report: Path) -> None:
    """One process of a launch."""
    torch.set_num_threads(1)
    entries, _ = chosen(setting, words)
    with joined(entries, setting) as running:
        found = measure([entry.name for entry in entries], running, setting, rounds, turn_seconds)
        if dist.get_rank() == 0:
            report.write_text(json.dumps(asdict(found)))


def compare(size: str, options: argparse.Namespace) -> tuple[list[Row], list[Absent]]:
    """The rows of a size, in launches of their own."""
    setting = Setting(JOBS[size], options.processes, options.microbatches)
    entries, absent = chosen(setting, options.only)
    reported = launch_and_read(__file__, options.processes, options, sizes=[size])
    times = {name: Times(**series) for name, series in reported["times"].items()}
    found = Rounds(times, reported["slowdowns"], reported["distances"])
    peaks = {} if options.no_peaks else {entry.name: measure_peaks(entry.name, setting) for entry in entries}
    return rows_of(size, setting, entries, found, peaks), absent


def report_of(size: str, rows: list[Row], absent: list[Absent]) -> str:
    """The table of a size."""
    head = f"{size}: {rows[0].processes} processes, {rows[0].microbatches} microbatches"
    missing = "\n".join(f"left out: {one.name}: {one.reason}" for one in absent)
    return "\n\n".join(part for part in (head, table(rows), missing) if part)


def main() -> None:
    parser = option_parser(__doc__, worker=True)
    parser.add_argument("--sizes", nargs="+", choices=JOBS, default=list(JOBS), help="of the model (default: all)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8, help="of two samples, in a step")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument("--turn-seconds", type=float, default=TURN_SECONDS, help="of each contender, in a round")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="contenders with one of these in their names")
    parser.add_argument("--no-peaks", action="store_true", help="do not measure memory, which takes a launch for each")
    options = parser.parse_args()
    if options.worker is not None:
        setting = Setting(JOBS[options.sizes[0]], options.processes, options.microbatches)
        work(setting, options.only, options.rounds, options.turn_seconds, options.worker)
        return
    report = Report(options.save)
    report.add(conditions("benchmarks/throughput.py"))
    found = []
    for size in options.sizes:
        rows, absent = compare(size, options)
        report.add("", report_of(size, rows, absent))
        found += rows
    report.add("", LEGEND, "", *(json.dumps(asdict(row)) for row in found))


if __name__ == "__main__":
    main()
