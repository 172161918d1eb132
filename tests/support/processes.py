"""A pool of processes that the tests share.

Starting a process and importing torch takes seconds. So the pool starts once and runs many jobs, and its processes are
forks of one that has imported what most jobs need. Each job gets a process group of its own over Gloo, which is
destroyed when the job ends. A job is a function of an importable module or of a file of tests, which each process
imports under the name that pytest gave it.

After a job that fails, ends its process or takes too long, its processes are replaced. All processes end with the one
that started them, even if it is killed.
"""

import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

_AFTER_SECONDS = 60.0
"""How long the other processes may still take after one has failed."""
_TOLD_SECONDS = 1.0
"""How long a process may take to write its stacks."""
IMPORTED = (
    "torch",
    # Imported by the first optimizer and by the first traced model of a process.
    "torch._dynamo",
    "torch.export._trace",
    "penstock.pipeline",
    "penstock.capturing.export.exported",
    "penstock.profiling",
    "penstock.planning",
    "pytest",
    "hypothesis",
    "transformers.models.gpt2.modeling_gpt2",
    "peft",
)
COLLECTIONS = (20_000, 20, 20)
"""The thresholds of `gc.set_threshold` in the processes of tests, which make little garbage."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A process of the pool. It writes its stacks to the file `stacks` on request."""

    process: BaseProcess
    connection: Connection
    stacks: Path


_Answer: TypeAlias = tuple[bool, Any]
"""Whether a job went well, and what it returned; or what went wrong."""


class Pool:
    """`size` processes that run jobs together. A job may take `seconds`; the processes have `imported` the modules."""

    def __init__(self, size: int, seconds: float = 240.0, imported: Sequence[str] = IMPORTED) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(imported))
        self._directory = tempfile.TemporaryDirectory()
        self._seconds = seconds
        self._started = 0
        self._members = [self._start() for _ in range(size)]

    def run(self, ranks: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``job(*arguments)`` in `ranks` processes of one process group; what each returned, by rank."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        members = self._members[:ranks]
        function = job.func if isinstance(job, partial) else job
        module, work = sys.modules[function.__module__], pickle.dumps((job, arguments))
        for rank, member in enumerate(members):
            member.connection.send((rank, ranks, port, module.__name__, module.__file__, work))
        answers = self._collect(members)
        failures = [f"rank {rank}:\n{answer}" for rank, (good, answer) in enumerate(answers) if not good]
        if failures:
            for member in members:
                _end(member)
            self._members[:ranks] = [self._start() for _ in members]
        assert not failures, "\n".join(failures)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for member in self._members:
            with suppress(OSError):
                member.connection.send(None)
        for member in self._members:
            member.process.join(timeout=10)
            _end(member)
        self._directory.cleanup()

    def _start(self) -> _Member:
        self._started += 1
        stacks = Path(self._directory.name) / f"{self._started}.stacks"
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, str(stacks)), daemon=True)
        process.start()
        # As long as this process also held the other end, it would not see it close.
        there.close()
        return _Member(process, here, stacks)

    def _collect(self, members: Sequence[_Member]) -> list[_Answer]:
        """What all of them answer, in their order."""
        began = time.monotonic()
        deadline, answers = began + self._seconds, dict[Connection, _Answer]()
        waiting = {member.connection: member for member in members}
        while waiting and (ready := wait(waiting, max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                answers[connection] = good, _ = _receive(waiting.pop(connection))
                if not good:
                    deadline = min(deadline, time.monotonic() + _AFTER_SECONDS)
        for connection, member in waiting.items():
            waited = f"did not answer within {time.monotonic() - began:.0f} s. Its threads are here:"
            answers[connection] = False, f"{waited}\n{_ask_for_stacks(member)}"
        return [answers[member.connection] for member in members]


def _receive(member: _Member) -> _Answer:
    try:
        answer: _Answer = member.connection.recv()
        return answer
    except (EOFError, OSError):
        member.process.join(timeout=10)
        return False, f"its process ended, with exit code {member.process.exitcode}"
    except Exception:
        return False, f"what it answered cannot be read:\n{traceback.format_exc()}"


def _ask_for_stacks(member: _Member) -> str:
    assert member.process.pid is not None
    with suppress(ProcessLookupError):
        os.kill(member.process.pid, signal.SIGUSR1)
        time.sleep(_TOLD_SECONDS)
    return member.stacks.read_text() if member.stacks.exists() else ""


def _end(member: _Member) -> None:
    member.process.kill()
    member.process.join(timeout=10)
    member.connection.close()


def _serve(connection: Connection, stacks: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    reported = open(stacks, "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=reported)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    # What the processes share stays as it is: no collection of garbage need look through it.
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        if task is None:
            return
        rank, ranks, port, name, file, work = task
        try:
            _import(name, file)
            job, arguments = pickle.loads(work)
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=120),
            )
            answer = (True, job(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        connection.send(answer)


def _import(name: str, file: str) -> None:
    """Imports the module `name`, which no path of Python need lead to: it is in `file`."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        specification = importlib.util.spec_from_file_location(name, file)
        assert specification is not None
        assert specification.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)


def _end_with_parent() -> None:
    """Ends this process when its parent has ended, however that was: a process that hangs would keep its device."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
