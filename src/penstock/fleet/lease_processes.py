"""A training as processes of this machine: start it, ask it to save and leave, and find it again.

A process writes its number into a file before it becomes the training, and carries the name of its lease in its
environment, as all do that it starts. So an executor that was killed finds the trainings that it left, and takes no
other process for one. The workers of torchrun have sessions of their own: only their environment tells whose they are.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MARK = "PENSTOCK_FLEET_LEASE"
_POLL_SECONDS = 0.05


def training_words(words: Sequence[str], processes: int) -> tuple[str, ...]:
    """The command line of a training on `processes` processes of this machine: plain Python for one, else torchrun,
    which passes the executor's signal on.
    """
    if processes == 1:
        return (sys.executable, *words)
    agent = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    return (sys.executable, *agent, "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", *words)


@dataclass(slots=True)
class LeaseProcess:
    """The first process of a lease, which starts the others."""

    number: int
    lease: str
    child: "subprocess.Popen[bytes] | None" = None
    """None if another executor started it."""
    asked: bool = False
    """Whether it has had the signal to save and leave."""

    @classmethod
    def start(cls, words: Sequence[str], lease: str, folder: Path, environment: Mapping[str, str]) -> "LeaseProcess":
        """Starts `words` in a session of its own; its output is appended to ``output.txt`` in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        note = shlex.quote(str(folder / "process"))
        script = f"echo $$ > {note} && exec {shlex.join(words)}"
        with (folder / "output.txt").open("ab") as output:
            child = subprocess.Popen(
                ["/bin/sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, _MARK: lease},
                start_new_session=True,
            )
        return cls(child.pid, lease, child)

    def exit_code(self) -> int | None:
        """None while it runs. A process that another executor started leaves no code: it counts as failed, -1."""
        if self.child is not None:
            return self.child.poll()
        return None if _is_lease(self.number, self.lease) else -1

    def wait(self, grace_seconds: float) -> int:
        """Waits for its end, and kills all of its lease after `grace_seconds`. Its exit code."""
        deadline = time.monotonic() + grace_seconds
        while (code := self.exit_code()) is None:
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(_POLL_SECONDS)
        # Its agent may have gone before its workers.
        self.kill()
        return code

    def ask(self) -> None:
        """Sends SIGUSR1, once: save and leave."""
        if not self.asked:
            _send(self.number, signal.SIGUSR1)
        self.asked = True

    def kill(self) -> None:
        """Kills what is left of the lease."""
        kill_all(self.lease)
        if self.child is not None:
            self.child.wait()


def find_left_behind(folder: Path, lease: str) -> LeaseProcess | None:
    """The process of `lease` that an earlier executor started in `folder`, if it still runs."""
    try:
        number = int((folder / "process").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return LeaseProcess(number, lease) if _is_lease(number, lease) else None


def kill_all(lease: str) -> None:
    """Kills every process of `lease`, and those that they start meanwhile."""
    while found := [number for number in _numbers() if _is_lease(number, lease)]:
        for number in found:
            _send(number, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _numbers() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _is_lease(number: int, lease: str) -> bool:
    try:
        environment = Path(f"/proc/{number}/environ").read_bytes()
    except OSError:
        return False
    return f"{_MARK}={lease}".encode() in environment.split(b"\0")


def _send(number: int, sent: signal.Signals) -> None:
    try:
        os.kill(number, sent)
    except ProcessLookupError:
        return
