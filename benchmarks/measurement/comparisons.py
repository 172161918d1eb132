"""The rows of the throughput benchmark: what each contender took, and what that is worth beside the others."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contenders.contenders import DDP, ONE_PROCESS, Entry
from contenders.jobs import Setting
from measurement.ideals import fastest, ideal_seconds, overhead, speedup
from measurement.rounds import Rounds
from penstock.values.quantities import table_lines


@dataclass(frozen=True, slots=True)
class Row:
    """One contender. Seconds are those of a step; a ratio is None where there is nothing to compare with."""

    size: str
    processes: int
    microbatches: int
    name: str
    median_seconds: float
    least_seconds: float
    most_seconds: float
    processor_seconds: float
    """In all processes together."""
    share_of_perfect: float | None
    """One process, divided by the processes and slowed down by their company, over this."""
    share_of_ideal: float | None
    """The same with the schedule's own bubble."""
    overhead_seconds: float | None
    """For each of a rank's forwards and backwards: what it takes beyond the ideal."""
    over_plain: float
    """How many times as fast as the plain loop in one process."""
    over_peer: float | None
    """And as torch's schedule of the same kind."""
    over_ddp: float | None
    over_best_flush: float | None
    """And as the fastest of torch's schedules, all of which flush."""
    distance: float
    """How far the weights moved in the first steps: the same for all but the asynchronous schedules."""
    peak_bytes: list[int] | None
    """By rank; None where it was not measured."""
    sent_bytes: list[float]
    """In a step, by rank, from schedule and shapes."""


def rows_of(
    size: str, setting: Setting, entries: Sequence[Entry], found: Rounds, peaks: Mapping[str, list[int]]
) -> list[Row]:
    """A row for each of `entries`, all of which were `found`."""
    times = found.times
    single = times[ONE_PROCESS].wall
    perfect = ideal_seconds(single, found.slowdowns, setting.processes)
    best = fastest({name: taken.wall for name, taken in times.items() if is_peer(name)})

    def over(entry: Entry, other: str | None) -> float | None:
        if other not in times or other == entry.name or entry.alone:
            return None
        return speedup(times[other].wall, times[entry.name].wall)

    rows = []
    for entry in entries:
        own = times[entry.name].wall
        ideal = ideal_seconds(single, found.slowdowns, setting.processes, entry.lengthening)
        rows.append(
            Row(
                size,
                setting.processes,
                setting.microbatches,
                entry.name,
                statistics.median(own),
                min(own),
                max(own),
                statistics.median(times[entry.name].processor),
                None if entry.alone else speedup(perfect, own),
                None if entry.alone else speedup(ideal, own),
                None if entry.alone else overhead(ideal, own, entry.actions),
                speedup(single, own),
                over(entry, entry.peer),
                over(entry, DDP),
                over(entry, best),
                found.distances[entry.name],
                peaks.get(entry.name),
                list(entry.sent_bytes),
            )
        )
    return rows


def is_peer(name: str) -> bool:
    """Whether it is one of torch's pipeline schedules."""
    return name.startswith("torch ") and name != DDP


def table(rows: Sequence[Row]) -> str:
    """The rows of one size, with what each was compared with."""
    head = "ms per step,median,least,most,cpu,perfect,ideal,us/action,plain,peer,DDP,best,peak MB,sent MB"
    lines = [head.split(",")]
    for row in rows:
        seconds = (row.median_seconds, row.least_seconds, row.most_seconds, row.processor_seconds)
        shares = (row.share_of_perfect, row.share_of_ideal)
        ratios = (row.over_plain, row.over_peer, row.over_ddp, row.over_best_flush)
        lines.append(
            [
                row.name,
                *(f"{1e3 * one:.2f}" for one in seconds),
                *("" if one is None else f"{one:.0%}" for one in shares),
                "" if row.overhead_seconds is None else f"{1e6 * row.overhead_seconds:.0f}",
                *("" if one is None else f"{one:.2f}x" for one in ratios),
                _most(row.peak_bytes),
                _most(row.sent_bytes),
            ]
        )
    return "\n".join(table_lines(lines, left=(0,)))


def _most(numbers: Sequence[float] | None) -> str:
    """The number of the rank that has the most, in MB."""
    return f"{max(numbers) / 1e6:.3g}" if numbers else ""


LEGEND = """\
perfect: the speed of p processes that do nothing but their share, slowed down as measured, that this reaches; ideal:
the same with the schedule's own bubble; us/action: what each forward and backward of a rank takes beyond the ideal;
plain, peer, DDP, best: how many times as fast as the plain loop in one process, torch's same schedule, DDP, torch's
fastest schedule; peak, sent: of the rank with the most; cpu: processor time of all processes."""
