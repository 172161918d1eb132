"""Jobs of several processes that are started again after a failure, as torchrun does, but in a second each.

The processes are forks of one that has imported torch and Penstock, which would take seconds in each of them.
"""

import math
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from penstock.runtime.files.step_directories import LOCK
from penstock.testing.faults import FAULTS, Fault
from reliability import training

__all__ = ["Job", "Outcome", "run_job"]

_GRACE_SECONDS = 60.0
"""How long the other processes may take to end after one has failed."""
_RUN_SECONDS = 300.0
_STEP_SECONDS = 1.0
"""How long a whole run, and each of its steps, may take on a busy machine."""


@dataclass(frozen=True, slots=True)
class Job:
    """A training in `ranks` processes. `shared_memory`: whether they send through it, or through sockets."""

    ranks: int
    schedule: str
    steps: int
    save_every: int
    shared_memory: bool = True


@dataclass(slots=True)
class Outcome:
    """How a job ended. `codes`: of each attempt, the exit codes by rank. `result`: what rank 0 wrote at its end."""

    codes: list[list[int | None]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    """What is still there and should not be: sockets and files."""
    ending_seconds: list[float] = field(default_factory=list)
    """Of each attempt in which a process failed, the time from its end to that of the last other one."""
    errors: str = ""
    """What the last attempt wrote to its standard error."""


def run_job(job: Job, directory: Path, faults: Sequence[Fault] = (), attempts: int = 1) -> Outcome:
    """Runs `job` in `directory`, at most `attempts` times; `faults` name theirs by ``restart``."""
    outcome = Outcome()
    temporary = directory / "temporary"
    temporary.mkdir(parents=True, exist_ok=True)
    before = _shared_memory_files()
    # As under torchrun, one store serves all attempts.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in range(attempts):
        codes, ending_seconds, outcome.errors = _attempt(job, directory, faults, attempt=attempt, port=store.port)
        outcome.codes.append(codes)
        if not any(codes):
            break
        outcome.ending_seconds.append(ending_seconds)
    outcome.result = training.read_result(directory)
    outcome.left = [
        *sorted(_shared_memory_files() - before),
        *(str(path) for path in temporary.rglob("*") if path.is_socket() or path.is_file()),
        # A lock file that no process holds locks nothing.
        *(path.name for path in (directory / "checkpoints").glob("*") if not path.name.startswith(("step-", LOCK))),
    ]
    return outcome


def _attempt(
    job: Job, directory: Path, faults: Sequence[Fault], *, attempt: int, port: int
) -> tuple[list[int | None], float, str]:
    """Runs all processes once. Returns their exit codes, the seconds between the first failure and the end of the last
    process, and the standard errors.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["penstock.pipeline", "torch._dynamo", "reliability.training"])
    shared = {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(job.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "PENSTOCK_SHARED_MEMORY": str(int(job.shared_memory)),
        "TMPDIR": str(directory / "temporary"),
        # Flight records of a process that was killed stay for the doctor.
        "PENSTOCK_RUN_DIR": str(directory / "flight"),
        FAULTS: "; ".join(map(str, faults)),
    }
    logs = [directory / f"attempt-{attempt}-rank-{rank}.log" for rank in range(job.ranks)]
    processes = [
        context.Process(target=_serve, args=(job, directory, {**shared, "RANK": str(rank)}, log))
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    ending_seconds = _wait(processes, _RUN_SECONDS + _STEP_SECONDS * job.steps)
    return [process.exitcode for process in processes], ending_seconds, "\n".join(log.read_text() for log in logs)


def _wait(processes: Sequence[BaseProcess], seconds: float) -> float:
    """Waits for the end of all, at most for `seconds`, and kills those that stand still after one has failed. Returns
    the seconds since the first failure.
    """
    deadline, failed = time.monotonic() + seconds, math.inf
    waiting = {process.sentinel: process for process in processes}
    while waiting and time.monotonic() < deadline:
        for sentinel in wait(list(waiting), max(0.0, deadline - time.monotonic())):
            assert isinstance(sentinel, int)
            ended = waiting.pop(sentinel)
            ended.join()
            if ended.exitcode:
                failed = min(failed, time.monotonic())
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    for process in waiting.values():
        process.kill()
        process.join()
    return max(0.0, time.monotonic() - failed)


def _serve(job: Job, directory: Path, environment: Mapping[str, str], log: Path) -> None:
    """One process of the job."""
    os.environ.update(environment)
    opened = os.open(log, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(opened, descriptor)
    os.close(opened)
    # The fork server ignores Ctrl-C for its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        training.train(directory / "checkpoints", job.schedule, job.steps, job.save_every)
    finally:
        sys.stdout.flush()


def _shared_memory_files() -> set[str]:
    """The files that processes have left which have ended. PyTorch names them ``torch_<process>_...``; the files of
    living processes may be of other work on this machine.
    """
    found = [path for path in Path("/dev/shm").glob("*") if "penstock" in path.name or "torch" in path.name]
    made_by = {path: re.match(r"torch_(\d+)_", path.name) for path in found}
    return {str(path) for path, maker in made_by.items() if maker is None or not Path("/proc", maker[1]).exists()}
