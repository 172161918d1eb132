"""Processes that answer orders until one of them fails, is killed or hangs."""

import faulthandler
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOADED = ["torch._dynamo", "torch.export._trace", "torch.distributed.pipelining", "penstock.pipeline"]
PRELOADED += ["penstock.capturing.export.exported"]


class Failed(Exception):
    """A crew could not answer, and is to be closed. The message is the reason, in a line."""


class Crew:
    """The processes of a launch, which answer one order after the other until one of them fails."""

    def __init__(
        self, processes: int, prepare: Callable[..., Any], arguments: Sequence[Any], limit_seconds: float, gpu: bool
    ) -> None:
        """`prepare`, called in each process with its rank and `arguments`, returns what answers orders there."""
        # Copies of a process that has imported the modules start soon. CUDA does not survive being copied.
        context: Any = multiprocessing.get_context("spawn" if gpu else "forkserver")
        if not gpu:
            context.set_forkserver_preload(PRELOADED)
        self._limit_seconds = limit_seconds
        self._processes, self._connections = [], []
        for rank in range(processes):
            here, there = context.Pipe()
            serving = (there, limit_seconds, prepare, rank, *arguments)
            self._processes.append(context.Process(target=_serve, args=serving, daemon=True))
            self._processes[-1].start()
            # Only the process itself holds this end, so that its death closes the connection.
            there.close()
            self._connections.append(here)

    def ask(self, order: str) -> list[Any]:
        """The answers to `order`, by rank. Raises `Failed` if a process fails, ends, or takes longer than the limit."""
        # Processes that have ended are noticed below.
        with suppress(OSError):
            for connection in self._connections:
                connection.send(order)
        answers: dict[int, Any] = {}
        ranks = {connection: rank for rank, connection in enumerate(self._connections)}
        end = time.monotonic() + self._limit_seconds
        while missing := [connection for connection, rank in ranks.items() if rank not in answers]:
            ready = wait(missing, max(0.0, end - time.monotonic()))
            if not ready:
                raise Failed(f"no answer from rank {ranks[missing[0]]} within {self._limit_seconds:g} s")
            for connection, rank in ((one, ranks[one]) for one in missing if one in ready):
                try:
                    good, answers[rank] = connection.recv()
                except (EOFError, OSError):
                    self._processes[rank].join(timeout=5)
                    raise Failed(f"rank {rank} ended with exit code {self._processes[rank].exitcode}") from None
                if not good:
                    raise Failed(answers[rank])
        return [answers[rank] for rank in sorted(answers)]

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            # A driver may hold a process for a long time.
            process.join(timeout=10)
            connection.close()


def _serve(connection: Connection, limit_seconds: float, prepare: Callable[..., Any], rank: int, *rest: Any) -> None:
    """One process of a crew, until it is killed."""
    try:
        # The stacks of a process that hangs are printed before it is killed.
        faulthandler.dump_traceback_later(0.9 * limit_seconds)
        respond = prepare(rank, *rest)
        while True:
            order = connection.recv()
            faulthandler.dump_traceback_later(0.9 * limit_seconds)
            connection.send((True, respond(order)))
            faulthandler.cancel_dump_traceback_later()
    except BaseException as error:
        traceback.print_exc()
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        connection.send((False, f"{type(error).__name__}: {first}"[:300]))
        # Threads of the process that wait for others must not keep it alive.
        os._exit(1)
