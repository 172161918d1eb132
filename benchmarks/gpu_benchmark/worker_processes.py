"""Worker processes that answer one request after another. A failure in one ends all of them and is reported in a line.

A benchmark of many contenders must outlive each of them: one that runs out of memory, hangs, or takes its process down
becomes a row with the reason, and a new crew goes on with the next one.
"""

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

import torch

Respond: TypeAlias = Callable[[Any], Any]
"""What a process of a crew does with an order; its answer can be sent."""
Prepare: TypeAlias = Callable[..., Respond]
"""Called in each process with its rank, how many processes there are, and the arguments of the crew."""

_IMPORTED = ["torch", "torch._dynamo", "torch.export._trace", "torch.distributed.pipelining", "penstock.pipeline"]
_LONGEST_REASON = 300


class Failed(Exception):
    """A crew could not answer, and is no more; the message is the reason in a line."""


class Crew:
    """Holds the processes of one launch."""

    def __init__(self, processes: int, prepare: Prepare, arguments: Sequence[Any] = (), copies: bool = True) -> None:
        """`copies`: whether the processes are copies of one that has imported what most need, which starts them sooner.
        A process that is to use a GPU must not be one: its driver does not survive being copied.
        """
        context = multiprocessing.get_context("forkserver" if copies else "spawn")
        if copies:
            context.set_forkserver_preload(_IMPORTED)
        self._processes, self._connections = [], []
        for rank in range(processes):
            here, there = context.Pipe()
            serving = (there, copies, dict(os.environ), prepare, rank, processes, tuple(arguments))
            process = context.Process(target=_serve, args=serving, daemon=True)
            process.start()
            # Only the process itself holds that end, so that its death can be seen.
            there.close()
            self._processes.append(process)
            self._connections.append(here)

    def ask(self, order: Any, seconds: float) -> list[Any]:
        """What each process answers to `order`, by rank. `Failed`, after which there is no crew, if one of them fails,
        ends, or takes longer than `seconds`.
        """
        try:
            for connection in self._connections:
                connection.send(order)
        except OSError:
            # What it died of is read below.
            pass
        answers: dict[int, Any] = {}
        end = time.monotonic() + seconds
        ranks = {connection: rank for rank, connection in enumerate(self._connections)}
        while len(answers) < len(ranks):
            missing = [connection for connection, rank in ranks.items() if rank not in answers]
            reported = wait(missing, max(0.0, end - time.monotonic()))
            if not reported:
                self._fail(f"no answer from rank {ranks[missing[0]]} within {seconds:.0f} s")
            for connection in reported:
                answers[ranks[connection]] = self._read(ranks[connection])
        return [answers[rank] for rank in sorted(answers)]

    def _read(self, rank: int) -> Any:
        try:
            good, answer = self._connections[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(timeout=5)
            self._fail(f"the process of rank {rank} ended with exit code {self._processes[rank].exitcode}")
        return answer if good else self._fail(answer)

    def _fail(self, reason: str) -> Any:
        self.close()
        raise Failed(reason)

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            # A driver may hold on to it for longer than anybody wants to wait.
            process.join(timeout=10)
        for connection in self._connections:
            connection.close()


def _serve(
    connection: Connection,
    copied: bool,
    environment: dict[str, str],
    prepare: Prepare,
    rank: int,
    processes: int,
    arguments: tuple[Any, ...],
) -> None:
    """One process, until it is killed."""
    # A copy begins with the environment of its original, which may have been started before these variables were set.
    os.environ.update(environment)
    torch.set_num_threads(1)
    if copied:
        # What the process inherits stays; a collection of garbage would look through all of it.
        gc.freeze()
    try:
        respond = prepare(rank, processes, *arguments)
        while True:
            connection.send((True, respond(connection.recv())))
    except BaseException as error:
        connection.send((False, reason_of(error)))
        # Whatever it leaves behind, threads that wait for others among it, must not hold it up.
        os._exit(1)


def reason_of(error: BaseException) -> str:
    """`error` in a line."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:_LONGEST_REASON]
