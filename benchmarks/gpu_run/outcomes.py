"""Writes the outcome of each test as soon as it is known: a plugin of pytest, and the reader of its file.

If a process hangs or dies, the outcomes so far are in the file. The next process skips the tests that were begun, so
that one bad test costs one row and not the rest of its file. A JUnit file, by contrast, is written only at the end.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ANSWERS", "BROKEN", "CUT", "FILE", "PERSIST", "Answers", "write"]

FILE = "PENSTOCK_OUTCOMES"
"""The variable that names the file."""
PERSIST = "PENSTOCK_OUTCOMES_PERSIST"
"""Set: the process goes on after an error of the device."""
ANSWERS = "outcomes.jsonl"
CUT = "cut"
"""The outcome of a test that may be begun again: its time was up, and not for its own fault."""
BROKEN = "CUDA error"
"""What PyTorch says of errors after which a process can often do nothing more with its device."""
_WORST_LAST = ("passed", "skipped", "xfailed", "xpassed", "failed")


@dataclass(slots=True)
class Answers:
    """What the file says."""

    collected: int = 0
    begun: dict[str, None] = field(default_factory=dict)
    """In order."""
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By test."""

    @classmethod
    def read(cls, file: Path) -> "Answers":
        """An incomplete last line is left out: its writer was killed."""
        found = cls()
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if "collected" in value:
                found.collected = max(found.collected, value["collected"])
            elif "begun" in value:
                found.begun[value["begun"]] = None
                found.outcomes.pop(value["begun"], None)
            else:
                found.outcomes[value["test"]] = value
        return found

    @property
    def open(self) -> list[str]:
        """Tests that were begun and of which nothing more is known."""
        return [test for test in self.begun if test not in self.outcomes]

    @property
    def done(self) -> set[str]:
        """Tests that need not be begun again."""
        return {test for test in self.begun if self.outcomes.get(test, {}).get("outcome") != CUT}

    def counts(self) -> dict[str, int]:
        """How many tests had each outcome."""
        reported = [value["outcome"] for value in self.outcomes.values()]
        return {outcome: reported.count(outcome) for outcome in sorted(set(reported))}


def write(file: Path, **value: Any) -> None:
    """One line."""
    with file.open("a") as lines:
        lines.write(json.dumps(value) + "\n")


class _Recorder:
    """Writes while pytest runs."""

    def __init__(self, file: Path) -> None:
        self._file, self._persists = file, PERSIST in os.environ
        self._reports: list[Any] = []
        self._session: Any = None
        self._terminal: Any = None

    def pytest_sessionstart(self, session: Any) -> None:
        self._session = session
        self._terminal = session.config.pluginmanager.get_plugin("terminalreporter")

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self._terminal.write_line(f"\n{report.longreprtext}")

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        before = Answers.read(self._file).done
        passed_over = [item for item in items if item.nodeid in before]
        config.hook.pytest_deselected(items=passed_over)
        items[:] = [item for item in items if item.nodeid not in before]

    def pytest_collection_finish(self, session: Any) -> None:
        write(self._file, collected=len(session.items) + len(Answers.read(self._file).done))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports.clear()
        write(self._file, begun=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcomes = [_outcome(report) for report in self._reports]
        seconds = sum(report.duration for report in self._reports)
        worst = max(range(len(outcomes)), key=lambda index: _WORST_LAST.index(outcomes[index]))
        reason = _reason(self._reports[worst])
        write(self._file, test=nodeid, outcome=outcomes[worst], seconds=round(seconds, 3), reason=reason)
        if outcomes[worst] != "failed":
            return
        # pytest itself would tell at its end, which it may not live to see.
        self._terminal.write_line(f"\n{self._reports[worst].longreprtext}")
        if BROKEN in self._reports[worst].longreprtext and not self._persists:
            self._session.shouldstop = "after an error of the device the other tests begin in a new process"


def _outcome(report: Any) -> str:
    expected = getattr(report, "wasxfail", None) is not None
    outcome = str(report.outcome)
    return {"skipped": "xfailed", "passed": "xpassed"}.get(outcome, outcome) if expected else outcome


def _reason(report: Any) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = [
        line for line in (crash.message if crash is not None else report.longreprtext).splitlines() if line.strip()
    ]
    return lines[0][:300] if lines else ""


def pytest_configure(config: Any) -> None:
    if FILE in os.environ:
        config.pluginmanager.register(_Recorder(Path(os.environ[FILE])))


def pytest_report_header() -> Iterator[str]:
    yield f"outcomes: {os.environ.get(FILE, 'not written')}"
