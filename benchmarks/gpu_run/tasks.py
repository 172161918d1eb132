"""Does the tasks of a group within its limit. Each becomes a row, whatever becomes of the task."""

import json
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpu_run.children import INTERVAL_SECONDS, OUTPUT, Child, Ending, last_words
from gpu_run.outcomes import ANSWERS, CUT, FILE, PERSIST, Answers, write
from gpu_run.parts import Group, Program, Suite, Task

__all__ = ["Row", "Status", "do_group"]

Status = Literal["done", "failed", "overdue", "skipped", "unreached"]
LEAST_SECONDS = 8.0
"""To start Python and import torch; with less than this left nothing is begun."""
FRESH_STARTS = 5
"""The number of errors of the device after which a file's tests go on in the same process."""
NO_CARD = "no CUDA device: torch.cuda.is_available() is false"
_RAN, _NONE_SELECTED = (0, 1), 5


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a task."""

    name: str
    status: Status
    reason: str
    seconds: float
    found: list[Any] = field(default_factory=list)
    """What a program wrote."""
    counts: dict[str, int] = field(default_factory=dict)
    """Tests by outcome."""
    tests: list[dict[str, Any]] = field(default_factory=list)


def do_group(group: Group, seconds: float, has_card: bool, log: Path) -> Iterator[Row]:
    """A row for each of its tasks, in the order in which they end. `log` gets all that they say."""
    deadline = time.monotonic() + seconds
    possible = [task for task in group.tasks if has_card or not task.needs_card]
    yield from (Row(task.name, "skipped", NO_CARD, 0) for task in group.tasks if task not in possible)
    yield from _do_programs([one for one in possible if isinstance(one, Program)], group.at_once, deadline, log)
    yield from _do_suites([one for one in possible if isinstance(one, Suite)], deadline, log)


def _new_folder() -> Path:
    # The names of sockets in it must not be long.
    return Path(tempfile.mkdtemp(prefix="gpu-"))


def _left(task: Task, deadline: float) -> float:
    """Seconds that `task` may take; 0 if it cannot be begun."""
    left = min(task.limit_seconds, deadline - time.monotonic())
    return left if left >= min(LEAST_SECONDS, task.limit_seconds) else 0.0


def _unreached(task: Task) -> Row:
    return Row(task.name, "unreached", "the time of its group was used up", 0)


# Programs


def _do_programs(programs: Sequence[Program], at_once: int, deadline: float, log: Path) -> Iterator[Row]:
    waiting = deque(programs)
    running: list[tuple[Program, Child]] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                program = waiting.popleft()
                if seconds := _left(program, deadline):
                    running.append((program, _start(program, seconds)))
                else:
                    yield _unreached(program)
            for program, child in list(running):
                if (ending := child.poll()) is not None:
                    running.remove((program, child))
                    yield _program_row(program, child, ending, log)
            time.sleep(INTERVAL_SECONDS)
    finally:
        for program, child in running:
            child.kill()
            _close(program.name, child, "left when the part was ended", log)


def _start(program: Program, seconds: float) -> Child:
    folder = _new_folder()
    arguments = [
        str(folder / word.removeprefix("FOLDER/")) if word.startswith("FOLDER/") else word for word in program.arguments
    ]
    return Child(arguments, folder, seconds, program.variables)


def _program_row(program: Program, child: Child, ending: Ending, log: Path) -> Row:
    found, broken = _read_found(child.folder / program.found)
    status: Status = "done"
    reason = ""
    if ending.overdue:
        status, reason = "overdue", ending.overdue
    elif ending.code != 0:
        status, reason = "failed", f"exit code {ending.code}: {last_words(child.folder)}"
    elif broken or not found:
        status, reason = "failed", broken or f"it left no {program.found}"
    _close(program.name, child, f"{status} after {ending.seconds:.1f} s {reason}", log)
    return Row(program.name, status, reason, round(ending.seconds, 2), found)


def _read_found(file: Path) -> tuple[list[Any], str]:
    """The values in it, and what is wrong with it. An incomplete last line is left out: its writer was killed."""
    if not file.exists():
        return [], ""
    values, wrong = [], ""
    text = file.read_text()
    for line in text.splitlines() if file.suffix == ".jsonl" else [text]:
        try:
            values.append(json.loads(line))
        except ValueError as error:
            wrong = f"{file.name}: {error}"
    return values, wrong


# Tests


def _do_suites(suites: Sequence[Suite], deadline: float, log: Path) -> Iterator[Row]:
    """Each file once; then those again whose time was up, as long as there is any."""
    folders = [_new_folder() for _ in suites]
    waiting = deque((suite, folder, 0.0) for suite, folder in zip(suites, folders, strict=True))
    first_round = len(waiting)
    try:
        while waiting:
            suite, folder, spent = waiting.popleft()
            seconds = _left(suite, deadline) if first_round > 0 else max(0.0, deadline - time.monotonic())
            first_round -= 1
            if seconds < min(LEAST_SECONDS, suite.limit_seconds):
                yield _suite_row(suite, folder, spent, "", ended=False) if spent else _unreached(suite)
                continue
            start = time.monotonic()
            wrong, ended = _do_suite(suite, folder, start + seconds, log)
            spent += time.monotonic() - start
            if ended:
                yield _suite_row(suite, folder, spent, wrong, ended=True)
            else:
                waiting.append((suite, folder, spent))
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _do_suite(suite: Suite, folder: Path, deadline: float, log: Path) -> tuple[str, bool]:
    """What is wrong with the file itself, and whether nothing is left to be done. A test that hangs or ends its process
    is noted, and the others go on in a new one.
    """
    outcomes = folder / ANSWERS
    starts = 0
    while (seconds := deadline - time.monotonic()) >= min(LEAST_SECONDS, suite.limit_seconds):
        before = Answers.read(outcomes)
        variables = {FILE: str(outcomes), **({PERSIST: "1"} if starts > FRESH_STARTS else {})}
        child = Child(_pytest(suite), folder, seconds, variables, outcomes, suite.silence_seconds)
        try:
            ending = child.wait()
        finally:
            child.kill()
        starts += 1
        after = Answers.read(outcomes)
        timed_out = ending.overdue.startswith("not done")
        for test in after.open:
            _note(outcomes, test, ending, timed_out)
        words = last_words(folder)
        _keep_output(suite.name, folder, f"exit code {ending.code} {ending.overdue}", log)
        # Not by the exit code alone: whatever ends pytest from within may choose any.
        if ending.code in _RAN and len(after.done) >= after.collected:
            return "", True
        if timed_out:
            return "", False
        if ending.code == _NONE_SELECTED:
            return ("" if after.begun else "no test was selected"), True
        if len(after.begun) == len(before.begun):
            return f"{ending.overdue or f'exit code {ending.code}'}: {words}", True
    return "", False


def _pytest(suite: Suite) -> list[str]:
    # A warning that has not been seen yet would make an error of any test here; the first run reports it instead.
    words = ["-m", "pytest", suite.path, "-m", "gpu", "-v", "--tb=short", "--no-summary", "-p", "gpu_run.outcomes"]
    words += ["-p", "no:cacheprovider", "-o", "filterwarnings=default", *suite.options]
    if suite.selection:
        words += ["-k", suite.selection]
    return [*words, "--runxfail"] if suite.run_expected_failures else words


def _note(outcomes: Path, test: str, ending: Ending, timed_out: bool) -> None:
    """What is known of a test that its process left open."""
    if timed_out:
        write(outcomes, test=test, outcome=CUT, seconds=0.0, reason="the time of its file was up")
    elif ending.overdue:
        write(outcomes, test=test, outcome="hung", seconds=0.0, reason=ending.overdue)
    else:
        write(outcomes, test=test, outcome="crashed", seconds=0.0, reason=f"its process ended with {ending.code}")


def _suite_row(suite: Suite, folder: Path, seconds: float, wrong: str, ended: bool) -> Row:
    answers = Answers.read(folder / ANSWERS)
    counts = answers.counts()
    tests = list(answers.outcomes.values())
    reason = wrong
    status: Status = "done"
    bad = [test for test in tests if test["outcome"] in ("failed", "hung", "crashed")]
    if not ended:
        status = "overdue"
        reason = f"{answers.collected - len(answers.done)} of {answers.collected} tests not done when the time was up"
    elif wrong or bad:
        status = "failed"
        reason = wrong or f"{bad[0]['test'].rpartition('::')[2]}: {bad[0]['reason']}"
    elif tests and counts.keys() == {"skipped"}:
        status, reason = "skipped", "; ".join(sorted({test["reason"] for test in tests}))
    return Row(suite.name, status, reason, round(seconds, 2), counts=counts, tests=tests)


# What they say


def _close(name: str, child: Child, ending: str, log: Path) -> None:
    _keep_output(name, child.folder, ending, log)
    shutil.rmtree(child.folder, ignore_errors=True)


def _keep_output(name: str, folder: Path, ending: str, log: Path) -> None:
    """Moves the output to `log`, with that of scripts which tests had started and did not live to read."""
    with log.open("a") as lines:
        lines.write(f"\n===== {name}\n")
        for file in sorted([folder / OUTPUT, *folder.rglob("*.err")], key=lambda one: one.name != OUTPUT):
            if not file.is_file() or not file.stat().st_size:
                continue
            if file.name != OUTPUT:
                lines.write(f"----- {os.path.relpath(file, folder)}\n")
            lines.write(file.read_text(errors="replace"))
            file.unlink()
        lines.write(f"===== {name}: {ending}\n")
