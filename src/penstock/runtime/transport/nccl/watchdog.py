"""Looks after what GPUs send each other: whether it goes on, while the host waits for none of it.

A GPU that waits for a message waits for ever, and with it, sooner or later, its host. A thread looks whether another
rank has failed, a connection has broken, or nothing has come or gone for too long; then it aborts the communicators,
which lets the GPU and the host go on, and whoever next asks is told why.

All communicators are told to end before any is waited for: one that ends may wait for all that the device is at, and
so for a message over another one.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.runtime.transport.timeouts import POLL_SECONDS, TELLING_SECONDS, Timeout

__all__ = ["End", "PendingWork", "Task", "Watchdog"]

ABORT_SECONDS = 20.0
"""How long communicators may take to end."""


@dataclass(slots=True, eq=False)
class Task:
    """Something that a GPU has been told to do."""

    is_done: Callable[[], bool]


class PendingWork:
    """What a GPU has been told to do and is not known to have done. Its methods are called on any thread."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        """Oldest first."""
        self._looking = threading.Lock()

    def add(self, is_done: Callable[[], bool]) -> Task:
        """Notes one thing more."""
        self.oldest()
        task = Task(is_done)
        self._tasks.append(task)
        return task

    def oldest(self) -> object | None:
        """What has been underway for longest; what is done is forgotten. None if all is done."""
        with self._looking:
            while self._tasks and self._tasks[0].is_done():
                self._tasks.popleft()
            return self._tasks[0] if self._tasks else None

    def finished(self, seconds: float) -> bool:
        """Waits so long until all is done; whether it is."""
        deadline = time.monotonic() + seconds
        while self.oldest() is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(TELLING_SECONDS)
        return True


class End(Protocol):
    """Of an edge, or of a sum."""

    @property
    def peers(self) -> Sequence[int]:
        """The other ranks."""

    @property
    def underway(self) -> PendingWork:
        """What they have a part in."""


class _Watched(NamedTuple):
    end: End
    abort: Callable[[], None]
    failure: Callable[[], str]


class Watchdog:
    """Waits with `timeout` over ends, once it is told of some. `enter`: what its thread calls first."""

    def __init__(self, timeout: Timeout, enter: Callable[[], None] = lambda: None) -> None:
        self._patience, self._enter = timeout, enter
        self._watched: dict[str, _Watched] = {}
        """By the name of the place."""
        self._failure: Exception | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def over(self, place: str, end: End, abort: Callable[[], None], failure: Callable[[], str] = lambda: "") -> None:
        """Watches over `end` as well. `abort` ends what it waits for; `failure` says what has broken it, if it has."""
        self._watched[place] = _Watched(end, abort, failure)

    def start(self) -> None:
        """Begins, if there is anything to watch over."""
        if self._watched:
            self._thread = threading.Thread(target=self._run, name="penstock watch", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raises why the communicators were aborted, if they were."""
        if self._failure is not None:
            raise self._failure

    def abort(self) -> None:
        """Ends all that the device waits for."""
        aborts = [
            threading.Thread(target=_try, args=(watched.abort,), name=f"penstock abort {place}", daemon=True)
            for place, watched in self._watched.items()
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
        """Raises what is wrong; returns at the end."""
        before: dict[str, object] = {}
        deadline = self._patience.deadline()
        while not self._closed.wait(POLL_SECONDS):
            for place, watched in self._watched.items():
                if failure := watched.failure():
                    raise self._patience.broken(place, watched.end.peers, RuntimeError(failure))
            waits = {place: watched.end.underway.oldest() for place, watched in self._watched.items()}
            now = {place: oldest for place, oldest in waits.items() if oldest is not None}
            if not now or any(now.get(place) is not oldest for place, oldest in before.items()):
                # Whatever comes or goes shows that the ranks are at work.
                deadline = self._patience.deadline()
            before = now
            place = next(iter(now), "")
            self._patience.check(deadline, place, self._watched[place].end.peers if now else ())


def _try(abort: Callable[[], None]) -> None:
    # One that has ended already says so.
    with suppress(RuntimeError):
        abort()
