"""A training as processes of one machine: start its ranks, ask them to save and leave, and find them again.

Ranks have the variables that torchrun sets. Each leads a session of its own, and carries the name of its lease in its
environment, as all do that it starts. So an executor that was killed finds the trainings that it left, and takes no
other process for one.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from penstock.fleet.jobs import Kind

LOST = 256
"""Instead of the exit code of a training whose end was not seen: its node is gone, or another executor started it."""
THIS_NODE = "this"
_MARK = "PENSTOCK_FLEET_LEASE"
_POLL_SECONDS = 0.05
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


class Part(NamedTuple):
    """The ranks of a training that one node has. `number`: that of the node in the training."""

    node: str
    workers: int
    number: int
    ranks: range


@dataclass(frozen=True, slots=True)
class Launch:
    """A training that is to be started: a script with its arguments, in a folder that all nodes see."""

    lease: str
    words: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    processes: int
    devices: str
    nodes: tuple[str, ...]
    """The node of each worker."""

    @property
    def note(self) -> Path:
        """The file that says which lease the training has now."""
        return self.folder / "lease"

    def parts(self) -> list[Part]:
        """The ranks of each node, in the order of the workers; none for a node without a rank."""
        found: list[Part] = []
        before, workers = 0, len(self.nodes)
        for node, count in Counter(self.nodes).items():
            after = before + count
            ranks = range(self.processes * before // workers, self.processes * after // workers)
            found += [Part(node, count, len(found), ranks)] if ranks else []
            before = after
        return found


class LeaseProcesses(Protocol):
    """The processes of a lease, wherever they are."""

    def exit_code(self) -> int | None:
        """None while they run; then a code that is not 0, if there is one, or `LOST`."""

    def ask(self) -> None:
        """Sends SIGUSR1 to every rank: save and leave."""

    def kill(self) -> None:
        """Kills what is left of them."""


class Nodes(Protocol):
    """The machines of a fleet."""

    def there(self, kinds: Sequence[Kind]) -> Mapping[str, Mapping[str, int]]:
        """How many devices each node has now, by the name of the devices and by that of the node."""

    def start(self, launch: Launch) -> LeaseProcesses:
        """Starts a training; a failure of the start shows as an exit code."""

    def find(self, launch: Launch) -> LeaseProcesses | None:
        """What an earlier executor started, if it still runs; kills what is left of it otherwise."""


class ThisNode:
    """The machine of the executor, which emulates every kind."""

    def there(self, kinds: Sequence[Kind]) -> Mapping[str, Mapping[str, int]]:
        return {kind.devices: {THIS_NODE: kind.workers} for kind in kinds}

    def start(self, launch: Launch) -> LeaseProcesses:
        (part,) = launch.parts()
        return NodeRanks(launch, part)

    def find(self, launch: Launch) -> LeaseProcesses | None:
        leaders = [number for number in _processes(launch.lease) if _leads(number)]
        if not leaders:
            _kill_all(launch.lease)
        return _FoundRanks(launch.lease, leaders) if leaders else None


class NodeRanks:
    """The ranks of a lease on one node."""

    def __init__(
        self,
        launch: Launch,
        part: Part,
        master: tuple[str, int] = ("127.0.0.1", 0),
        cwd: str | None = None,
        bound: bool = False,
    ) -> None:
        """Starts them. `master`: where all ranks of the training meet; port 0 for any that is free. `bound`: they die
        with this process.
        """
        self._launch, self._lease, self._asked = launch, launch.lease, False
        self._master = master if master[1] else (master[0], _free_port())
        name = f"output-{part.number}.txt" if part.number else "output.txt"
        with (launch.folder / name).open("ab") as output:
            self._children = [
                subprocess.Popen(
                    [sys.executable, *launch.words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=cwd,
                    env={**os.environ, **launch.environment, **_variables(launch, part, rank, self._master)},
                    start_new_session=True,
                    preexec_fn=partial(ctypes.CDLL(None).prctl, _DIE_WITH_PARENT, signal.SIGKILL) if bound else None,
                )
                for rank in part.ranks
            ]
        self._numbers: Sequence[int] = [child.pid for child in self._children]

    def master(self) -> tuple[str, int]:
        """Where all ranks of the training meet."""
        return self._master

    def wait(self) -> int:
        """The exit code, when there is one. Ranks whose training has another lease by now, since their node was cut
        off, are killed.
        """
        while (code := self.exit_code()) is None:
            if self._launch.note.read_text() != self._lease:
                self.kill()
            time.sleep(_POLL_SECONDS)
        return code

    def exit_code(self) -> int | None:
        """As of `LeaseProcesses`. If a rank fails, the others are killed, unless they have been asked to leave."""
        codes = [child.poll() for child in self._children]
        # Those that were killed since another failed have -9.
        failed = max((code for code in codes if code), default=0)
        if None in codes and (not failed or self._asked):
            return None
        if None in codes:
            self.kill()
        return failed

    def ask(self) -> None:
        self._asked = True
        for number in {*_processes(self._lease)} & {*self._numbers}:
            _send(number, signal.SIGUSR1)

    def kill(self) -> None:
        _kill_all(self._lease)
        for child in self._children:
            child.wait()


class _FoundRanks(NodeRanks):
    """Ranks that another executor started, which leave no code."""

    def __init__(self, lease: str, numbers: Sequence[int]) -> None:
        self._lease, self._numbers, self._children = lease, numbers, []

    def exit_code(self) -> int | None:
        return None if {*_processes(self._lease)} & {*self._numbers} else LOST


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def _variables(launch: Launch, part: Part, rank: int, master: tuple[str, int]) -> dict[str, str]:
    """What torchrun puts into the environment of a rank, and the name of the lease. One process alone is no group."""
    if launch.processes == 1:
        return {_MARK: launch.lease}
    numbers = {"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": rank - part.ranks.start, "GROUP_RANK": part.number}
    sizes = {"WORLD_SIZE": launch.processes, "LOCAL_WORLD_SIZE": len(part.ranks)}
    sizes |= {"ROLE_WORLD_SIZE": launch.processes, "GROUP_WORLD_SIZE": len(launch.parts())}
    others = {"MASTER_ADDR": master[0], "MASTER_PORT": master[1], "TORCHELASTIC_RUN_ID": launch.lease}
    others |= {"ROLE_NAME": "default", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    return {name: str(value) for name, value in {**numbers, **sizes, **others, _MARK: launch.lease}.items()}


def _processes(lease: str) -> list[int]:
    """The numbers of all processes of a lease on this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"{_MARK}={lease}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _kill_all(lease: str) -> None:
    """Kills every process of `lease`, and those that they start meanwhile."""
    while found := _processes(lease):
        for number in found:
            _send(number, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _leads(number: int) -> bool:
    """Whether a process leads its session, as ranks do."""
    with suppress(ProcessLookupError):
        return os.getsid(number) == number
    return False


def _send(number: int, sent: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(number, sent)
