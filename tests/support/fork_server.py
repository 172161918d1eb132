"""A fork server for scripts: each script starts as a fork of a process that has already imported torch and Penstock.

The imports would take seconds in each process that a test starts. A fork has its own environment, arguments and
output, it can be killed or stopped, and it exits like any Python process.
"""

import gc
import importlib.util
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def outlive(processes: "list[Child]", failing: int, seconds: float) -> list[tuple[int | None, str]]:
    """The exit code and standard error of all but the `failing` one, which may never end."""
    try:
        return finish([process for rank, process in enumerate(processes) if rank != failing], seconds)
    finally:
        processes[failing].kill()
        processes[failing].communicate()


def finish(processes: "list[Child]", seconds: float = 240) -> list[tuple[int | None, str]]:
    """The exit code and standard error of each process. Raises if one does not end in `seconds`."""
    try:
        errors = [process.communicate(timeout=seconds)[1] for process in processes]
        return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]
    except subprocess.TimeoutExpired as error:
        for number, process in enumerate(processes):
            error.add_note(f"standard error of process {number}, exit code {process.poll()}:\n{process.errors()}")
        raise
    finally:
        for process in processes:
            process.kill()


class ForkServer:
    """Starts scripts as forks of one process, which has run the file `warm`, if there is one, under this name."""

    def __init__(self, warm: str | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._started = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__, *([warm] if warm else [])],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path = Path()) -> "Child":
        """Starts ``python ARGUMENTS`` in `folder`; the first argument is a script."""
        self._started += 1
        stem = Path(self._directory.name) / str(self._started)
        place = {"folder": str(folder.absolute()), "stem": str(stem)}
        pid = self.ask(arguments=list(arguments), environment=dict(environment), **place)
        return Child(self, pid, stem)

    def start_ranks(self, arguments: Sequence[str], ranks: int, folder: Path = Path()) -> "list[Child]":
        """Starts `ranks` processes of one script, as torchrun does, but without its supervision."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # A run that fails leaves its records.
            "PENSTOCK_RUN_DIR": os.environ.get("PENSTOCK_RUN_DIR", f"{self._directory.name}/run {self._started}"),
        }
        return [self.start(arguments, {**os.environ, **shared, "RANK": str(rank)}, folder) for rank in range(ranks)]

    def start_faulty(self, ranks: int, rank: int, when: str, deed: str, *options: str) -> "list[Child]":
        """Starts a training in `ranks` processes, of which `rank` does something: see scripts/faulty_training.py."""
        script = Path(__file__).parent / "scripts" / "faulty_training.py"
        return self.start_ranks([str(script), str(rank), when, deed, *options], ranks)

    def ask(self, **request: Any) -> Any:
        """Sends `request` to the process and returns its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the server, but not the scripts that it has started."""
        self._process.communicate()
        self._directory.cleanup()


class Child:
    """A running script, with those methods of `subprocess.Popen` that tests use."""

    def __init__(self, fork_server: ForkServer, pid: int, stem: Path) -> None:
        self._server, self._pid, self._stem = fork_server, pid, stem
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code (negative for a signal), None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask(ended=self._pid)
        return self.returncode

    def communicate(self, timeout: float = 240.0) -> tuple[str, str]:
        """Waits for the end and returns standard output and standard error. Raises `TimeoutExpired` after `timeout`."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self._pid}", timeout)
            time.sleep(0.02)
        return self._stem.with_suffix(".out").read_text(), self.errors()

    def errors(self) -> str:
        return self._stem.with_suffix(".err").read_text()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Kills it, or sends it another signal, if it still runs."""
        if self.poll() is None:
            os.kill(self._pid, number)


def _serve() -> str | None:
    """Forks at each request. Returns the path of the script in each fork, and None in the server at its end."""
    # There is much to look through, and no garbage.
    gc.disable()
    import torch._dynamo  # imported by the first optimizer of a process
    import torch.distributed
    import torch.export._trace  # noqa: F401

    import penstock
    import penstock.capturing.export.exported
    import penstock.planning

    assert penstock.Pipeline is not None
    if importlib.util.find_spec("sklearn") is not None:
        import sklearn.datasets  # noqa: F401  # the data of an example
    for warm in sys.argv[1:]:
        runpy.run_path(warm, run_name="warm")
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        request = json.loads(line)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        if pid := os.fork():
            print(json.dumps(pid), flush=True)
            continue
        _begin_anew(**request)
        return sys.argv[0]
    return None


def _begin_anew(arguments: list[str], environment: dict[str, str], folder: str, stem: str) -> None:
    files = (
        (os.devnull, os.O_RDONLY),
        (f"{stem}.out", os.O_WRONLY | os.O_CREAT),
        (f"{stem}.err", os.O_WRONLY | os.O_CREAT),
    )
    for descriptor, (path, flags) in enumerate(files):
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).absolute().parent)


if __name__ == "__main__":
    script = _serve()
    if script is not None:
        runpy.run_path(script, run_name="__main__")
