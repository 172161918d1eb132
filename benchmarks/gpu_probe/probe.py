"""What the programs of the probe share: notes that survive their process, and a kernel that spins for a known time.

The programs are costs.py, waits.py, queues.py and pairs.py. Each may hang or crash, so each runs in a process of its
own and writes every result at once.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Notes", "Spinner", "new_stream", "parser_of"]

WARM_UP_CYCLES = 400_000_000
"""A device that was idle takes some time to reach its clock."""
CALIBRATION_CYCLES = 100_000_000


@dataclass(frozen=True, slots=True)
class Notes:
    """Lines of JSON; written at once, and in one piece where several processes write them."""

    file: Path

    def add(self, kind: str, **value: Any) -> None:
        """One line."""
        line = json.dumps({"kind": kind, **value})
        with self.file.open("a") as lines:
            lines.write(line + "\n")
        print(line, flush=True)


class Spinner:
    """Keeps one stream of the current device busy for a time that was asked for."""

    def __init__(self) -> None:
        torch.cuda._sleep(WARM_UP_CYCLES)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        torch.cuda._sleep(CALIBRATION_CYCLES)
        ended.record()
        torch.cuda.synchronize()
        self.cycles_per_second = CALIBRATION_CYCLES / (begun.elapsed_time(ended) / 1e3)

    def spin(self, stream: torch.cuda.Stream, seconds: float) -> torch.cuda.Event:
        """Begins; the event is done when the device is done with it."""
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * self.cycles_per_second))
            ended = torch.cuda.Event()
            ended.record()
        return ended


def new_stream() -> int:
    """The handle of a stream that is in no pool of PyTorch's; it lives as long as the process."""
    handle = torch.zeros(1, dtype=torch.int64)
    torch.cuda.check_error(torch.cuda.cudart().cudaStreamCreate(handle.data_ptr()))
    return int(handle)


def parser_of(doc: str | None, names: Sequence[str]) -> argparse.ArgumentParser:
    """The arguments of a measurement: which one of `names`, if it has any, and the file of its notes."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if names:
        parser.add_argument("name", choices=names)
    parser.add_argument("--found", type=Path, required=True, help="the file for the notes, lines of JSON")
    return parser
