"""A diagnosis as one page: text for a terminal, a document for machines, and HTML."""

from dataclasses import asdict
from html import escape
from typing import Any

from penstock.doctor.conditions import Evidence, RankCondition
from penstock.doctor.diagnosis import Diagnosis
from penstock.doctor.records import ThreadRecord
from penstock.doctor.step_pictures import draw_step
from penstock.errors import counted
from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline
from penstock.values.quantities import bytes_text, seconds_text, table_lines

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }
pre { overflow-x: auto; padding: 1em; background: #8881; font-size: 13px; }
summary { cursor: pointer; }
:root { color-scheme: light dark; }
"""
_FRAMES = 12
"""The innermost calls of a stack that the text shows."""


def report_text(evidence: Evidence, diagnosis: Diagnosis) -> str:
    """The diagnosis for a terminal: verdict, edge, ranks, the step, and the stacks of the rank to blame."""
    lines = [*_head(evidence, diagnosis), "", *_table(evidence, diagnosis)]
    if picture := draw_step(evidence):
        lines += ["", "The present step:", *picture, *_LEGEND]
    culprit = diagnosis.rank
    if culprit is not None and (stacks := _stacks(evidence, culprit, all_threads=False)):
        lines += ["", f"The stack of rank {culprit}, innermost call last:", *stacks]
    return "\n".join(_printable(line) for line in lines)


def report_document(evidence: Evidence, diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis with all records, as values of JSON."""
    return {
        "verdict": str(diagnosis.verdict),
        "rank": diagnosis.rank,
        "sentence": diagnosis.sentence,
        "advice": diagnosis.advice,
        "edge": None if diagnosis.edge is None else asdict(diagnosis.edge),
        "conditions": [asdict(one) for one in diagnosis.conditions],
        "job": asdict(evidence.job),
        "processes": [asdict(process) for process in evidence.processes],
    }


def report_page(evidence: Evidence, diagnosis: Diagnosis) -> str:
    """The diagnosis as an HTML page that needs no other file, with the last actions as a picture and all stacks."""
    title = f"penstock doctor: {diagnosis.verdict}"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"/>',
        f"<title>{_html(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_html(title)}</h1>",
        f"<pre>{_html(report_text(evidence, diagnosis))}</pre>",
    ]
    if (timeline := _last_actions(evidence)) is not None:
        parts += ["<h2>The last actions, and the waits that began after them</h2>", timeline.svg()]
    for process in range(len(evidence.processes)):
        stacks = "\n".join(_stacks(evidence, process, all_threads=True))
        if stacks:
            parts.append(f"<details><summary>Stacks of rank {process}</summary><pre>{_html(stacks)}</pre></details>")
    return "\n".join([*parts, "</body></html>", ""])


_LEGEND = (
    "F forward, B backward, I and W its halves, U update; >F3 runs, ?b3 is waited before, f3 b3 u are still to do",
)


def _head(evidence: Evidence, diagnosis: Diagnosis) -> list[str]:
    job = evidence.job
    lines = [f"penstock doctor: {job.schedule}, {counted(job.ranks, 'rank')}", "", f"{diagnosis.verdict.upper()}: "]
    lines[-1] += f"{diagnosis.sentence}."
    if diagnosis.edge is not None:
        lines.append(f"Blocked edge {diagnosis.edge}.")
    return [*lines, f"{diagnosis.advice}."]


def _table(evidence: Evidence, diagnosis: Diagnosis) -> list[str]:
    rows = [("rank", "process", "host", "condition", "for", "steps", "memory", "what")]
    for process, condition in zip(evidence.processes, diagnosis.conditions, strict=True):
        record = process.record
        known = record is not None and record.memory.host_bytes is not None
        rows.append(
            (
                str(condition.process),
                str(process.identity.pid),
                process.identity.host,
                str(condition.condition),
                "" if condition.seconds is None else seconds_text(condition.seconds),
                "" if record is None else str(record.steps),
                bytes_text(record.memory.host_bytes or 0) if record is not None and known else "",
                _what(condition),
            )
        )
    return table_lines(rows, left=range(len(rows[0])))


def _what(condition: RankCondition) -> str:
    if condition.action:
        return f"{condition.action}: {condition.words}"
    return condition.words


def _stacks(evidence: Evidence, process: int, all_threads: bool) -> list[str]:
    found = evidence.processes[process]
    if found.stacks:
        return ["written at a signal, innermost call first:", *found.stacks.splitlines()]
    if found.record is None:
        return []
    if not found.answered and found.record.threads:
        lines = [f"as of {seconds_text(found.age_seconds)} ago:"]
    else:
        lines = []
    for thread in found.record.threads:
        if all_threads or thread.trains:
            lines += _stack(thread, len(thread.frames) if all_threads else _FRAMES)
    return lines


def _stack(thread: ThreadRecord, frames: int) -> list[str]:
    return [f"thread {thread.name}:", *(f"  {frame}" for frame in thread.frames[-frames:])]


def _last_actions(evidence: Evidence) -> Timeline | None:
    """The last actions of all ranks on one clock, and what runs now. Long waits are cut, or no action could be seen."""
    now = max((found.record.written_unix for found in evidence.processes if found.record is not None), default=0.0)
    spans: list[Span] = []
    running: list[tuple[int, str, float]] = []
    for found in evidence.processes:
        record = found.record
        if record is None or len(record.rows) != 1:
            continue
        rank, past = record.rows[0].rank, now - record.written_unix
        for one in record.last:
            began = -(one.began + past)
            spans.append(Span(rank, one.action, began, began + max(0.0, one.seconds)))
        row = record.rows[0]
        if row.runs and row.done < len(row.program):
            running.append((rank, row.program[row.done], -(row.seconds + past)))
    if not spans:
        return None
    first, last = min(span.start_seconds for span in spans), max(span.stop_seconds for span in spans)
    end = max([last, *(began for *_, began in running)]) + 0.25 * max(last - first, 1e-6)
    spans += [Span(rank, action, began, end) for rank, action, began in running]
    return Timeline(tuple(spans), 1 + max(span.rank for span in spans))


def _printable(line: str) -> str:
    """`line` without characters that would steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def _html(text: str) -> str:
    return escape("\n".join(_printable(line) for line in text.split("\n")))
