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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from penstock.fleet.jobs import Kind

LOST = 256
"""Instead of the exit code of a training whose end nobody saw: its node is gone, or another executor started it."""
THIS_NODE = "this"
_MARK = "PENSTOCK_FLEET_LEASE"
_POLL_SECONDS = 0.05
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A training that is to be started."""

    lease: str
    words: Sequence[str]
    """The script and its arguments."""
    folder: Path
    """Gets its output. All nodes see it."""
    environment: Mapping[str, str]
    processes: int
    devices: str
    nodes: tuple[str, ...]
    """The node of each worker."""

    @property
    def note(self) -> Path:
        """The file that says which lease the training has now."""
        return self.folder / "lease"

    def parts(self) -> list["Part"]:
        """The ranks of each node, in the order of the workers; none for a node without a rank."""
        names, workers, before = list(dict.fromkeys(self.nodes)), len(self.nodes), 0
        found: list[Part] = []
        for name in names:
            after = before + self.nodes.count(name)
            ranks = range(self.processes * before // workers, self.processes * after // workers)
            if ranks:
                found.append(Part(name, after - before, len(found), ranks))
            before = after
        return found


@dataclass(frozen=True, slots=True)
class Part:
    """The ranks of a training that one node has."""

    node: str
    workers: int
    number: int
    """Of the node in the training."""
    ranks: range


class LeaseProcesses(Protocol):
    """The processes of a lease, wherever they are."""

    def exit_code(self) -> int | None:
        """None while they run; then the first code that is not 0, or 0, or `LOST`."""

    def ask(self) -> None:
        """Sends SIGUSR1 to every rank: save and leave."""

    def kill(self) -> None:
        """Kills what is left of them."""


class Nodes(Protocol):
    """The machines of a fleet."""

    def there(self, kinds: Sequence[Kind]) -> Mapping[str, Mapping[str, int]]:
        """How many devices each node has that is there now, by the name of the devices and by that of the node."""

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
        return NodeRanks.start(launch, part, ("127.0.0.1", free_port()))

    def find(self, launch: Launch) -> LeaseProcesses | None:
        numbers = [number for number in _numbers() if _is_lease(number, launch.lease) and _leads(number)]
        if not numbers:
            kill_all(launch.lease)
        return NodeRanks(launch.lease, numbers) if numbers else None


def number_workers(
    kinds: Sequence[Kind], before: Mapping[str, Sequence[str]], there: Mapping[str, Mapping[str, int]]
) -> dict[str, list[str]]:
    """The node of each worker, by the name of the devices; empty for a worker that is not there. Workers keep the nodes
    that they had `before`. `there`: how many devices each node has; it should be `workers_per_server` of the kind.
    """
    found = {}
    for kind in kinds:
        left = Counter(there.get(kind.devices, {}))
        names = [*before.get(kind.devices, ()), *[""] * kind.workers][: kind.workers]
        for worker, name in enumerate(names):
            left[name] -= 1
            if left[name] < 0:
                names[worker] = ""
        new = left.elements()
        found[kind.devices] = [name or next(new, "") for name in names]
    return found


@dataclass(slots=True)
class NodeRanks:
    """The ranks of a lease on one machine."""

    lease: str
    numbers: Sequence[int]
    children: "Sequence[subprocess.Popen[bytes]]" = ()
    """None of them if another executor started them."""
    asked: bool = False

    @classmethod
    def start(
        cls, launch: Launch, part: Part, master: tuple[str, int], cwd: str | None = None, bound: bool = False
    ) -> "NodeRanks":
        """Starts the ranks of `part`, which meet at the address and the port of `master`. `bound`: they die with the
        process that started them.
        """
        die = partial(ctypes.CDLL(None).prctl, _DIE_WITH_PARENT, signal.SIGKILL)
        name = f"output-{part.number}.txt" if part.number else "output.txt"
        with (launch.folder / name).open("ab") as output:
            children = [
                subprocess.Popen(
                    [sys.executable, *launch.words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=cwd,
                    env={**os.environ, **launch.environment, **_variables(launch, part, rank, master)},
                    start_new_session=True,
                    preexec_fn=die if bound else None,
                )
                for rank in part.ranks
            ]
        return cls(launch.lease, [child.pid for child in children], children)

    def exit_code(self) -> int | None:
        """As of `LeaseProcesses`. If a rank fails, the others are killed, unless they have been asked to leave."""
        if not self.children:
            return None if any(_is_lease(number, self.lease) for number in self.numbers) else LOST
        codes = [child.poll() for child in self.children]
        # Those that were killed since another failed have -9.
        failed = max((code for code in codes if code), default=0)
        if None in codes and (not failed or self.asked):
            return None
        if None in codes:
            self.kill()
        return failed

    def ask(self) -> None:
        self.asked = True
        for number in self.numbers:
            if _is_lease(number, self.lease):
                _send(number, signal.SIGUSR1)

    def kill(self) -> None:
        kill_all(self.lease)
        for child in self.children:
            child.wait()


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def kill_all(lease: str) -> None:
    """Kills every process of `lease`, and those that they start meanwhile."""
    while found := [number for number in _numbers() if _is_lease(number, lease)]:
        for number in found:
            _send(number, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _variables(launch: Launch, part: Part, rank: int, master: tuple[str, int]) -> dict[str, str]:
    """What torchrun puts into the environment of a rank, and the name of the lease. One process alone is no group."""
    if launch.processes == 1:
        return {_MARK: launch.lease}
    nodes, local = len(launch.parts()), rank - part.ranks.start
    numbers = {"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": part.number}
    sizes = {"WORLD_SIZE": launch.processes, "ROLE_WORLD_SIZE": launch.processes, "GROUP_WORLD_SIZE": nodes}
    sizes |= {"LOCAL_WORLD_SIZE": len(part.ranks), "MASTER_PORT": master[1]}
    elastic = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": launch.lease}
    texts = {name: str(value) for name, value in (numbers | sizes).items()}
    return {**texts, **elastic, "MASTER_ADDR": master[0], "ROLE_NAME": "default", _MARK: launch.lease}


def _numbers() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _is_lease(number: int, lease: str) -> bool:
    try:
        environment = Path(f"/proc/{number}/environ").read_bytes()
    except OSError:
        return False
    return f"{_MARK}={lease}".encode() in environment.split(b"\0")


def _leads(number: int) -> bool:
    """Whether a process leads its session, as ranks do."""
    try:
        return os.getsid(number) == number
    except ProcessLookupError:
        return False


def _send(number: int, sent: signal.Signals) -> None:
    try:
        os.kill(number, sent)
    except ProcessLookupError:
        return
