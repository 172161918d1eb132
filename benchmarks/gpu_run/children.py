"""Child processes with limits: one that takes too long shows its stacks, and is ended with all that it has started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["OUTPUT", "Child", "Ending", "last_words"]

OUTPUT = "output.txt"
"""What a child says, both of its streams, in its folder."""
STACK_SECONDS = 0.15
"""What an aborted process has to write the stacks of its threads before the next one is aborted."""
STACKS_SECONDS = 2.0
"""What all of them have together."""
DEATH_SECONDS = 10.0
"""A driver may keep a killed process until the device has ended what it does."""
INTERVAL_SECONDS = 0.05
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a child ended."""

    code: int | None
    """Its exit code, that of a signal negative; None if even a kill has not ended it in time."""
    seconds: float
    overdue: str
    """Why it was ended; empty if it ended by itself."""


class Child:
    """``python ARGUMENTS`` in the root of the repository and in a process group of its own.

    `folder` is its directory for temporary files. Where `sign` is given, it is a file that the child writes to as long
    as it gets on, and the child is overdue when that has not happened for `silence_seconds`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        limit_seconds: float,
        variables: Mapping[str, str] | None = None,
        sign: Path | None = None,
        silence_seconds: float = float("inf"),
    ) -> None:
        self.folder, self.limit_seconds = folder, limit_seconds
        self._sign, self._silence_seconds = sign, silence_seconds
        self.started = time.monotonic()
        self._reason, self._seconds, self._aborted = "", 0.0, 0.0
        # Output goes to a file and not to a pipe: what survives a child would keep a pipe open.
        with (folder / OUTPUT).open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=_ROOT,
                env=_environment(folder, variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> Ending | None:
        """How it ended, None while it runs. What is overdue is ended here, in some seconds and as many calls."""
        now = time.monotonic()
        if not self._reason and not self._has_ended():
            self._reason = self._overdue(now)
            if not self._reason:
                return None
            self._seconds, self._aborted = now - self.started, now
            self._abort_members()
        if self._reason:
            since = now - self._aborted
            if since < STACKS_SECONDS and not self._is_alone():
                return None
            self._signal(signal.SIGKILL)
            if not self._has_ended() and since < STACKS_SECONDS + DEATH_SECONDS:
                return None
        return self._bury(self._seconds if self._reason else now - self.started)

    def wait(self) -> Ending:
        """How it ended, once it has."""
        while (ending := self.poll()) is None:
            time.sleep(INTERVAL_SECONDS)
        return ending

    def kill(self) -> None:
        """Ends it and its children at once."""
        self._signal(signal.SIGKILL)

    def _overdue(self, now: float) -> str:
        if now - self.started > self.limit_seconds:
            return f"not done after {self.limit_seconds:.0f} s"
        if self._sign is not None:
            wrote = self._sign.stat().st_mtime - time.time() + now if self._sign.exists() else self.started
            if now - max(wrote, self.started) > self._silence_seconds:
                return f"silent for {self._silence_seconds:.0f} s"
        return ""

    def _has_ended(self) -> bool:
        """Does not collect the process, so that its number, which is that of the group, is not given away yet."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _is_alone(self) -> bool:
        """Whether it has ended, and so has every process of its group."""
        return self._has_ended() and _members(self._process.pid) <= {self._process.pid}

    def _abort_members(self) -> None:
        """Python writes the stacks of all threads when it is aborted. One process after the other, the first one last:
        they write to one file, letter by letter.
        """
        own = self._process.pid
        for pid in sorted(_members(own), key=lambda pid: (pid == own, pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
            time.sleep(STACK_SECONDS)

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, number)

    def _bury(self, seconds: float) -> Ending:
        # Its own children, if any are left.
        self._signal(signal.SIGKILL)
        code = self._process.wait() if self._has_ended() else None
        return Ending(code, seconds, self._reason)


def _members(group: int) -> set[int]:
    """The processes of a process group that have not been waited for."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name of the program, in brackets, may hold anything.
            if int(entry.read_text().rpartition(")")[2].split()[2]) == group:
                found.add(int(entry.parent.name))
    return found


def _environment(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Penstock is imported from its sources, nothing asks the network, and what is aborted writes its stacks."""
    paths = [*(str(_ROOT / name) for name in ("src", "benchmarks")), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        **variables,
    }


def last_words(folder: Path, longest: int = 160) -> str:
    """The line of the child's output that says best why it failed: that of the last error, else the last one."""
    output = folder / OUTPUT
    # pytest puts an E before the lines of an error.
    lines = (
        [line.strip().removeprefix("E  ").strip() for line in output.read_text(errors="replace").splitlines()]
        if output.exists()
        else []
    )
    errors = [line for line in lines if line.partition(":")[0].rpartition(".")[2].endswith(("Error", "Exception"))]
    reported = errors or [line for line in lines if line]
    return reported[-1][:longest] if reported else "it said nothing"
