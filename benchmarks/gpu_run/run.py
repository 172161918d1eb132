"""The first run on a machine with a GPU, part by part: ``scripts/gpu 1``, then 2 and 3.

A part goes on past whatever fails, hangs or is missing, ends within its limit, and leaves part-N.json, part-N.log and
summary.txt. It imports no torch, so that nothing that torch does can stop it.
"""

import argparse
import json
import os
import re
import resource
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_run.parts import CLOSING_SECONDS, ENVIRONMENT, PARTS, Group, Part
from gpu_run.summary import parts_in, summary, table
from gpu_run.tasks import Row, do_group

__all__ = ["Record", "only", "run_part", "summarize"]

SUMMARY = "summary.txt"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Record:
    """What is known of a part so far, and its file: a run that is cut short has written all that it found."""

    part: Part
    folder: Path
    command: str
    started: float = field(default_factory=time.monotonic)
    environment: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.started

    @property
    def has_card(self) -> bool:
        """Also where it could not be found out: then the tasks find out."""
        return self.environment.get("devices") != []

    def add(self, row: Row) -> None:
        """Keeps `row` and says so."""
        self.rows.append(row)
        if row.name == ENVIRONMENT and row.found:
            self.environment = row.found[0]
        self.write()
        counts = ", ".join(f"{count} {outcome}" for outcome, count in row.counts.items())
        reported = "; ".join(one for one in (counts, row.reason) if one)
        print(f"{self.seconds:6.0f} s  {row.name:34} {row.status:10} {reported}"[:180], flush=True)

    def write(self) -> None:
        """All of it, for machines."""
        value = {
            "part": self.part.number,
            "title": self.part.title,
            "limit_seconds": self.part.limit_seconds,
            "seconds": round(self.seconds, 1),
            "command": self.command,
            "environment": self.environment,
            "rows": [asdict(row) for row in self.rows],
        }
        (self.folder / f"part-{self.part.number}.json").write_text(json.dumps(value, indent=1) + "\n")


def only(part: Part, pattern: str) -> Part:
    """`part` without the tasks whose names do not contain `pattern`; the environment is always reported."""
    groups = [
        replace(
            group,
            tasks=tuple(task for task in group.tasks if task.name == ENVIRONMENT or re.search(pattern, task.name)),
        )
        for group in part.groups
    ]
    return replace(part, groups=tuple(group for group in groups if group.tasks))


def run_part(part: Part, folder: Path, command: str = "") -> Record:
    """Does all of it, group after group. Each group may take its limit and what those before it have saved."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"part-{part.number}.log"
    log.write_text(f"part {part.number}: {part.title}\n{command}\n")
    record = Record(part, folder, command)
    record.write()
    later = sum(group.limit_seconds for group in part.groups)
    for group in part.groups:
        later -= group.limit_seconds
        left = part.limit_seconds - CLOSING_SECONDS - later - record.seconds
        for row in do_group(group, left, record.has_card, log):
            record.add(row)
    return record


def summarize(folder: Path) -> str:
    """The summary of all parts whose files are there, which is written beside them."""
    parts = parts_in(folder)
    text = (
        f"{summary(parts)}\n\n{table(parts)}\n" if parts else f"no part-N.json in {folder}: scripts/gpu 1 makes one\n"
    )
    if parts:
        (folder / SUMMARY).write_text(text)
    return text


def contents() -> str:
    """What the parts are."""
    lines = [
        "scripts/gpu N [--out DIR] [--only REGEX]   does part N; scripts/gpu summary tells again what was found",
        "",
    ]
    for part in PARTS:
        lines.append(f"{part.number}   {part.title} (at most {part.limit_seconds:.0f} s)")
        lines += [f"    {group.limit_seconds:4.0f} s  {_title(group)}" for group in part.groups]
    return "\n".join(lines)


def _title(group: Group) -> str:
    count = len(group.tasks)
    return group.title if count == 1 else f"{group.title}: {count} tasks, {group.at_once} at once"


def _stop(number: int, _: object) -> None:
    sys.exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=(__doc__ or "").partition("\n")[0])
    numbers = [str(part.number) for part in PARTS]
    parser.add_argument("what", nargs="*", choices=[*numbers, "summary", []], help="parts, or summary")
    parser.add_argument("--out", type=Path, help="the folder for the files; $OUT if set, else gpu-run", metavar="DIR")
    parser.add_argument("--only", default="", help="of a part only the tasks whose names contain it", metavar="REGEX")
    parser.add_argument("--commit", default="", help="of the sources, where git cannot tell it")
    options = parser.parse_args(arguments)
    folder = options.out or Path(os.environ.get("OUT") or ROOT / "gpu-run")
    if not options.what:
        print(contents())
        return
    # An aborted process shows its stacks; what it had in its memory, gigabytes maybe, is of no use.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGTERM, _stop)
    for what in options.what:
        if what != "summary":
            part = only(PARTS[numbers.index(what)], options.only)
            print(f"part {part.number}: {part.title}, at most {part.limit_seconds:.0f} s", flush=True)
            chosen = ["--only", options.only] if options.only else []
            record = run_part(part, folder, shlex.join(["scripts/gpu", what, *chosen]))
            if options.commit and not record.environment.get("commit"):
                record.environment["commit"] = options.commit
                record.write()
    print(f"\n{summarize(folder)}", end="")


if __name__ == "__main__":
    main()
