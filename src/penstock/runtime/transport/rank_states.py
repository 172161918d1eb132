"""What a rank knows of another one while it waits for it: at work, standing still, killed, or gone in good order.

Every rank writes signs of life to the store, with what it does. On one host the operating system knows more: whether a
process is stopped or has ended, also where a child of it keeps its connections open.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

_STILL_SECONDS = 3.0
"""Without a new sign of life for this long, a rank stands still; they come once a second."""
_ENDED, _STOPPED = ("Z", "X"), ("T", "t")
"""Letters for the state of a process in ``/proc``."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of some host."""

    host: str
    """The host and the process namespace of a container; empty if the system has no ``/proc``."""
    pid: int
    started: str
    """When the process started, in ticks since the host did: a process number is used again."""

    @classmethod
    def own(cls) -> "ProcessIdentity":
        """This process."""
        return cls(_host(), os.getpid(), _stat(os.getpid())[1])

    def fields(self) -> tuple[str, int, str]:
        """The fields, as a plain value."""
        return self.host, self.pid, self.started

    def has_ended(self) -> bool:
        """Whether the process is known to have ended."""
        return self._letter() in _ENDED

    def runs(self) -> bool:
        """Whether the process is known to run, or to wait for the processor."""
        return self._letter() not in ("", *_ENDED, *_STOPPED)

    def is_stopped(self) -> bool:
        """Whether the process is known to be stopped."""
        return self._letter() in _STOPPED

    def _letter(self) -> str:
        """The state of the process by the letter of ``/proc``; empty if it runs on another host."""
        if not self.host or self.host != _host():
            return ""
        letter, started = _stat(self.pid)
        return letter if started == self.started else "X"


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank as its last sign of life shows it."""

    beat: float
    """Differs from sign to sign."""
    place: str
    """Where its main thread was: in a step, in a save."""
    place_seconds: float
    """For how long, when it wrote this."""
    left: bool
    """Whether it takes part no longer: it closed its pipeline, or its script ended."""
    done: str
    """How far it came: after step 4."""
    seen: float = 0.0
    """When this process saw this sign first, by its own clock."""

    def fields(self) -> dict[str, Any]:
        """What a rank writes of itself, as a plain value."""
        return {
            "beat": self.beat,
            "place": self.place,
            "place_seconds": self.place_seconds,
            "left": self.left,
            "done": self.done,
        }

    @classmethod
    def read(cls, fields: Mapping[str, Any], before: "RankState | None") -> "RankState":
        """The state that a rank wrote. `before`: the state at the last look."""
        known = before is not None and before.beat == fields["beat"]
        return cls(**fields, seen=before.seen if before is not None and known else time.monotonic())

    def describe(self, process: ProcessIdentity | None) -> str:
        """What the rank does, as the end of a sentence about it. `process`: its process, if that is known."""
        silent = time.monotonic() - self.seen
        place = self.place or "outside the pipeline"
        last = f"its last sign of life came {silent:.1f} s ago, {place}"
        if self.left:
            return "has left: it closed its pipeline, or its script has ended"
        if process is not None and process.has_ended():
            return "was killed (out of memory?) or crashed: its process has ended"
        if process is not None and process.is_stopped():
            return f"stands still: its process is stopped (SIGSTOP, a debugger?), {last}"
        if silent > _STILL_SECONDS:
            return f"stands still, or its host does: {last}"
        return f"is at work, {place} for {self.place_seconds + silent:.1f} s"


@cache
def _host() -> str:
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _stat(pid: int) -> tuple[str, str]:
    """The state and the start of a process; ("X", "") if there is none."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        # The name of the program stands in brackets, and may contain any character.
        parts = file.read().rpartition(")")[2].split()
        return parts[0], parts[19]
    return "X", ""
