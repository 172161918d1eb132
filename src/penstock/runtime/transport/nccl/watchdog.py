"""Watches the operations between GPUs, which the host does not wait for, and aborts them when they cannot end.

A GPU that waits for a message waits forever if none comes, and sooner or later its host waits for the GPU. A thread
looks whether another rank has failed, a connection has broken, or no operation has started or ended for too long. Then
it aborts the communicators, so that the GPU and the host continue, and the next check raises the reason.

Aborting one communicator may block until the device is idle, and so until the operations of the others end. So all
aborts are started before any is waited for.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.runtime.collectives.timeouts import FAST_POLL_SECONDS, POLL_SECONDS, Timeout

ABORT_SECONDS = 20.0
"""How long the communicators may take to abort."""


@dataclass(slots=True, eq=False)
class _PendingTask:
    """An operation that has been enqueued on a GPU."""

    is_done: Callable[[], bool]


class PendingWork:
    """The operations that have been enqueued on a GPU and are not known to be done. Its methods are called on any
    thread.
    """

    def __init__(self) -> None:
        self._tasks: deque[_PendingTask] = deque()
        """Oldest first."""
        self._lock = threading.Lock()

    def add(self, is_done: Callable[[], bool]) -> _PendingTask:
        """Adds an operation."""
        self.oldest()
        task = _PendingTask(is_done)
        self._tasks.append(task)
        return task

    def oldest(self) -> object | None:
        """Drops operations that are done, and returns the oldest that is not; None if all are done."""
        with self._lock:
            while self._tasks and self._tasks[0].is_done():
                self._tasks.popleft()
            return self._tasks[0] if self._tasks else None

    def wait(self, seconds: float) -> bool:
        """Blocks until all operations are done, or for `seconds`. Returns whether they are done."""
        deadline = time.monotonic() + seconds
        while self.oldest() is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(FAST_POLL_SECONDS)
        return True


class _WatchedEndpoint(Protocol):
    """An endpoint of an edge, or of a sum."""

    @property
    def peers(self) -> Sequence[int]:
        """The other ranks."""

    @property
    def pending(self) -> PendingWork:
        """The operations in which they take part."""

    @property
    def waits_between_steps(self) -> bool:
        """Whether operations may be pending for as long as this process is outside of the pipeline's calls."""


class _Watched(NamedTuple):
    endpoint: _WatchedEndpoint
    abort: Callable[[], None]
    failure: Callable[[], str]


class Watchdog:
    """Watches endpoints with the limits of `timeout`. `enter`: called by the thread before anything else."""

    def __init__(self, timeout: Timeout, enter: Callable[[], None] = lambda: None) -> None:
        self._timeout, self._enter = timeout, enter
        self._watched: dict[str, _Watched] = {}
        """By the context that errors name."""
        self._failure: Exception | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(
        self,
        context: str,
        endpoint: _WatchedEndpoint,
        abort: Callable[[], None],
        failure: Callable[[], str] = lambda: "",
    ) -> None:
        """Watches `endpoint` as well. `abort` ends its operations; `failure` describes what has broken it, and is empty
        if nothing has.
        """
        self._watched[context] = _Watched(endpoint, abort, failure)

    def start(self) -> None:
        """Starts the thread, if there is anything to watch."""
        if self._watched:
            self._thread = threading.Thread(target=self._run, name="penstock watch", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raises the reason if the communicators were aborted."""
        if self._failure is not None:
            raise self._failure

    def look(self) -> None:
        """Like `check`, but asks the communicators now, and aborts them if one of them is broken."""
        self.check()
        try:
            self._check_connections()
        except Exception as error:
            # Before the thread has looked again.
            self._failure = error
            self.abort()
            raise

    def _check_connections(self) -> None:
        for context, watched in self._watched.items():
            if failure := watched.failure():
                raise self._timeout.connection_error(context, watched.endpoint.peers, RuntimeError(failure))

    def abort(self) -> None:
        """Ends all operations that the device waits for."""
        aborts = [
            threading.Thread(target=_try, args=(watched.abort,), name=f"penstock abort {context}", daemon=True)
            for context, watched in self._watched.items()
        ]
        for thread in aborts:
            thread.start()
        deadline = time.monotonic() + ABORT_SECONDS
        for thread in aborts:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in aborts):
            logging.getLogger("penstock").error(
                "the communicators of this rank did not end within %g s, and its GPU may wait for ever: end the "
                "process. They were to end because of: %s",
                ABORT_SECONDS,
                self._failure or "a failure of this rank",
            )

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._enter()
            self._look()
        except Exception as error:
            self._failure = error
            self.abort()

    def _look(self) -> None:
        """Raises what is wrong. Returns when the watchdog is closed."""
        before: dict[str, object] = {}
        deadline = self._timeout.deadline()
        while not self._closed.wait(POLL_SECONDS):
            self._check_connections()
            waits = {context: watched.endpoint.pending.oldest() for context, watched in self._watched.items()}
            outside = not self._timeout.board.watch.doing[0]
            now = {
                context: oldest
                for context, oldest in waits.items()
                if oldest is not None and not (outside and self._watched[context].endpoint.waits_between_steps)
            }
            if not now or any(now.get(context) is not oldest for context, oldest in before.items()):
                # An operation that starts or ends shows that the ranks are at work.
                deadline = self._timeout.deadline()
            before = now
            context = next(iter(now), "")
            self._timeout.check(deadline, context, self._watched[context].endpoint.peers if now else ())


def _try(abort: Callable[[], None]) -> None:
    # A communicator that has ended already raises.
    with suppress(RuntimeError):
        abort()
