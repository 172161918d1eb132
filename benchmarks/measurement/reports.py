"""What benchmarks take and print: options, the machine, tables, and a file with all lines."""

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import penstock
from penstock.values.quantities import table_lines


def option_parser(doc: str | None, *, worker: bool = False) -> argparse.ArgumentParser:
    """A parser with the first line of `doc`, and the option `--save`. `worker`: the script also starts itself in the
    processes of a launch, which write what they find to the file `--worker` (see `launch_and_read`).
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--save", type=Path, help="a file for what is printed")
    if worker:
        parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser


class Report:
    """Lines that are printed as they come, and are then in the file `save`, if there is one."""

    def __init__(self, save: Path | None) -> None:
        self._save = save
        self._lines: list[str] = []

    def add(self, *lines: str) -> None:
        print(*lines, sep="\n", flush=True)
        self._lines += lines
        if self._save is not None:
            self._save.write_text("\n".join(self._lines) + "\n")


def conditions(script: str) -> str:
    """The machine, the library and the command that runs `script`, in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    command = f"python {script} {shlex.join(sys.argv[1:])}".rstrip()
    return (
        f"machine: {os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB, {platform.system()}; "
        f"nice {os.nice(0)}; load average before: {os.getloadavg()[0]:.1f}\n"
        f"software: torch {version('torch')}, Python {platform.python_version()}, penstock {penstock.__version__}\n"
        f"command: {command}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns that are as wide as their widest cell, aligned left."""
    return "\n".join(table_lines([head, *rows], left=range(len(head))))
