"""What the operating system says of a process of this host: whether it runs, is stopped, or has ended."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache


class ProcessState(StrEnum):
    """What the operating system says of a process."""

    RUNNING = "running"
    """It runs, or waits for the processor."""
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"
    """It is on another machine, or the system has no ``/proc``."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identifies a process: also after its number was given to another one, and among several machines."""

    host: str
    machine: str
    """Equal for two processes that see each other's numbers."""
    pid: int
    born: int
    """When it started, in ticks since the machine's start; 0 if unknown."""

    @classmethod
    def own(cls) -> "ProcessIdentity":
        """This process."""
        host, pid = socket.gethostname(), os.getpid()
        return cls(host, f"{host} {_namespace()}", pid, _status(pid)[1] if _namespace() else 0)

    def state(self) -> ProcessState:
        """The state of the process."""
        if not self.born or self.machine != f"{socket.gethostname()} {_namespace()}":
            return ProcessState.UNKNOWN
        letter, born = _status(self.pid)
        if born != self.born or letter in "ZX":
            return ProcessState.GONE
        return ProcessState.STOPPED if letter in "Tt" else ProcessState.RUNNING


@cache
def _namespace() -> str:
    """The host since its start, and the process namespace of a container; empty if they are not known."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _status(pid: int) -> tuple[str, int]:
    """The state of a process by the letter of ``/proc``, and when it started, in ticks; ("", 0) if there is none."""
    with suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as file:
        # The name of the program stands in brackets, and may contain any character.
        fields = file.read().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return "", 0
