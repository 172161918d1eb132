"""What the parts of a first run found: one screen for people, and the lines of the table in docs/gpus.md."""

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["COLUMNS", "LINES", "WIDTH", "parts_in", "summary", "table"]

LINES, WIDTH = 45, 100
COLUMNS = (
    "date, commit",
    "card, driver",
    "torch, CUDA, NCCL",
    "command",
    "passed / failed / skipped",
    "main figures",
)
"""Of the table."""
BAD = ("failed", "hung", "crashed")
"""What a test may become that is a fault of the test or of Penstock."""
SHOWN = (
    "plain loop",
    "plain loop, compiled",
    "penstock, one stage",
    "penstock, one stage, compiled",
    "penstock 1f1b-flush",
    "penstock 2bw",
    "penstock zb-h1",
)
"""Of the benchmark's rows the first ones of these names."""
COSTS = {
    "event made, recorded": "event",
    "timing event made, recorded": "timing event",
    "timing event recorded again": "recorded again",
    "stream entered, left": "stream entered",
    "stream waits for event": "wait for event",
    "kernel (add_)": "launch",
    "300 add_": "300 add_",
    "_foreach_add_": "foreach",
}
FIGURES = {"tokens_per_second", "over_plain", "share_of_matrix"}
"""What a row of the benchmark has that has run."""

PartFile = dict[str, Any]


def parts_in(folder: Path) -> list[PartFile]:
    """The parts whose files are in `folder` or in a folder there, the latest of each."""
    found: dict[int, PartFile] = {}
    for file in [*folder.glob("part-*.json"), *folder.glob("*/part-*.json")]:
        part = json.loads(file.read_text())
        known = found.get(part["part"])
        if known is None or known["environment"].get("date", "") <= part["environment"].get("date", ""):
            found[part["part"]] = part
    return [found[number] for number in sorted(found)]


def summary(parts: Sequence[PartFile]) -> str:
    """One screen. What fails comes last and is what is cut where there is too much of it."""
    lines = [*_machine(parts)]
    for part in parts:
        lines += _part(part)
    for describe in (_tests, _costs, _waits, _queues, _pairs, _benchmark):
        lines += describe([row for part in parts for row in part["rows"]])
    failures = _failures(parts)
    room = LINES - len(_shortened(lines))
    if len(failures) > room:
        failures = [
            *failures[: room - 1],
            f"... {len(failures) - room + 1} more in part-N.json, with their output in part-N.log",
        ]
    return "\n".join(_shortened([*lines, *failures])[:LINES])


def _shortened(lines: Iterable[str]) -> list[str]:
    return [line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines]


def _wrapped(head: str, items: Iterable[str], most: int = 3) -> list[str]:
    """`items` in at most `most` lines."""
    reported = ", ".join(items)
    return (
        textwrap.wrap(f"{head}: {reported}", WIDTH, subsequent_indent="    ", max_lines=most, placeholder=" ...")
        if reported
        else []
    )


def _found(rows: Sequence[Any], kind: str) -> list[dict[str, Any]]:
    return [one for row in rows for one in row["found"] if one.get("kind") == kind]


# The screen


def _machine(parts: Sequence[PartFile]) -> list[str]:
    """A line for each machine that a part ran on."""
    seen: dict[str, list[int]] = {}
    for part in parts:
        seen.setdefault(f"{_card(part)}; {_versions(part)}; {part['environment'].get('cpus')} CPUs", []).append(
            part["part"]
        )
    return [
        line
        for reported, numbers in seen.items()
        for line in _wrapped(f"part {', '.join(map(str, numbers))}", [reported], 2)
    ]


def _card(part: PartFile) -> str:
    environment = part["environment"]
    devices = environment.get("devices") or []
    name = f"{len(devices)} x {devices[0]['name']}" if devices else "no card"
    return f"{name}, driver {_one_line(environment.get('driver')) or 'none'}"


def _versions(part: PartFile) -> str:
    environment = part["environment"]
    return ", ".join(
        f"{name} {environment.get(key) or 'none'}"
        for key, name in (("torch", "torch"), ("cuda", "CUDA"), ("nccl", "NCCL"))
    )


def _one_line(text: str | None) -> str:
    return (text or "").partition("\n")[0].strip()


def _part(part: PartFile) -> list[str]:
    statuses = [row["status"] for row in part["rows"]]
    reported = ", ".join(f"{statuses.count(status)} {status}" for status in sorted(set(statuses)))
    environment = part["environment"]
    where = f"{environment.get('date', 'date unknown')}, commit {environment.get('commit') or 'unknown'}"
    return [f"part {part['part']}: {part['seconds']:.0f} of {part['limit_seconds']:.0f} s, {where}: tasks {reported}"]


def _tests(rows: Sequence[Any]) -> list[str]:
    return [
        f"{row['name']:24} {row['seconds']:4.0f} s  "
        + ", ".join(f"{count} {name}" for name, count in row["counts"].items())
        for row in rows
        if row["counts"]
    ]


def _costs(rows: Sequence[Any]) -> list[str]:
    by_name = {one["name"]: one["microseconds"] for one in _found(rows, "cost") if "microseconds" in one}
    return _wrapped("host, us", [f"{short} {by_name[name]:.3g}" for name, short in COSTS.items() if name in by_name], 2)


def _waits(rows: Sequence[Any]) -> list[str]:
    """By how kernels are loaded: calls that wait, and those of which it is not known."""
    lines = []
    found = _found(rows, "wait")
    for loading in sorted({one["loading"] for one in found}, reverse=True):
        of_kind = [one for one in found if one["loading"] == loading]
        waiting = [one["name"] for one in of_kind if one["waits"] == "yes"]
        unknown = [f"{one['name']} (?)" for one in of_kind if one["waits"] == "unknown"]
        lines += _wrapped(f"{loading}: of {len(of_kind)} calls wait for a spin", waiting + unknown or ["none"])
    return lines


def _queues(rows: Sequence[Any]) -> list[str]:
    """The lines that say how many streams are held up, by the number of streams and of connections."""
    pools = {one["priority"]: one["repeats_after"] for one in _found(rows, "pool")}
    lines = _wrapped("pool of streams repeats after", [f"{again} (priority {one})" for one, again in pools.items()], 1)
    found = _found(rows, "queue")
    for connections in dict.fromkeys(one["connections"] for one in found):
        reported = []
        for first, priority in ((first, priority) for first in ("spins", "waits") for priority in (0, -1)):
            of_kind = [
                one
                for one in found
                if (one["connections"], one["first"], one["priority"]) == (connections, first, priority)
            ]
            reported.append(f"{first} {priority}: " + " ".join(f"{one['held']}/{one['streams']}" for one in of_kind))
        lines += _wrapped(f"held up, connections {connections}", reported, 2)
    return lines


def _pairs(rows: Sequence[Any]) -> list[str]:
    items = [f"{one['name']} {one['value']} {one['unit']}".strip() for one in _found(rows, "pair")]
    return _wrapped("two processes", items, 9)


def _benchmark(rows: Sequence[Any]) -> list[str]:
    figures = [_of_row(row) for row in _benchmark_rows(rows)]
    return [f"benchmark: {_rate(rows)}", *figures] if figures else []


def _benchmark_rows(rows: Sequence[Any]) -> list[dict[str, Any]]:
    timed = [one for row in rows if row["name"] == "benchmark" for value in row["found"] for one in value["rows"]]
    timed = [one for one in timed if one.keys() >= FIGURES]
    firsts = (next((one for one in timed if one["name"] == name), None) for name in SHOWN)
    return [one for one in firsts if one is not None]


def _rate(rows: Sequence[Any]) -> str:
    values = [value for row in rows if row["name"] == "benchmark" for value in row["found"]]
    rates = [rate for value in values for rate in value.get("matrix_flops", [])]
    return f"products of matrices at {max(rates) / 1e12:.0f} TFLOP/s" if rates else "no product of matrices timed"


def _of_row(row: dict[str, Any]) -> str:
    host = row.get("host_per_action")
    return (
        f"  {row['name']:29} {row['tokens_per_second']:10,.0f} tokens/s, {row['over_plain']:.3f} x plain, "
        f"{row['share_of_matrix']:.1%} of products" + (f", {1e6 * host:.0f} us/action" if host else "")
    )


def _failures(parts: Sequence[PartFile]) -> list[str]:
    """What was not done and why, and the tests that fail; tasks with one reason are one line."""
    reasons: dict[str, list[str]] = {}
    for part in parts:
        for row in part["rows"]:
            bad = [test for test in row["tests"] if test["outcome"] in BAD]
            for test in bad:
                reasons.setdefault(f"{test['outcome']}: {test['reason']}", []).append(test["test"].rpartition("::")[2])
            if row["status"] != "done" and not (bad and row["status"] == "failed"):
                reasons.setdefault(f"{row['status']}: {row['reason']}", []).append(row["name"])
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {' '.join(reason.split())}"
        for reason, names in reasons.items()
    ]


# The table


def table(parts: Sequence[PartFile]) -> str:
    """In Markdown, a line for each part."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(_cells(part) for part in parts)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def _cells(part: PartFile) -> list[str]:
    environment = part["environment"]
    return [
        f"{environment.get('date', 'unknown').partition(' ')[0]}, {environment.get('commit') or 'unknown'}",
        _card(part),
        _versions(part),
        f"`{part['command']}`",
        _counted(part),
        _main_figures(part) or "-",
    ]


def _counted(part: PartFile) -> str:
    counts: dict[str, int] = {}
    for row in part["rows"]:
        for outcome, count in row["counts"].items():
            counts[outcome] = counts.get(outcome, 0) + count
    if not counts:
        return "-"
    failed = sum(counts.get(outcome, 0) for outcome in BAD)
    others = "".join(
        f", {counts[one]} {one}" for one in ("hung", "crashed", "cut", "xfailed", "xpassed") if one in counts
    )
    return f"{counts.get('passed', 0)} / {failed} / {counts.get('skipped', 0)}{others}"


def _main_figures(part: PartFile) -> str:
    rows = part["rows"]
    reported = [*_costs(rows)[:1], *(" ".join(line.split()) for line in _waits(rows))]
    if benchmark := _benchmark_rows(rows):
        reported += [_rate(rows), *(f"{one['name']} {one['over_plain']:.3f} x plain" for one in benchmark)]
    return "; ".join(reported)
