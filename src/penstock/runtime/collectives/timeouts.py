"""How long this rank waits for others, and the errors when it stops waiting."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.errors import PenstockError, TransportError
from penstock.runtime.collectives.failures import FailureBoard, name_ranks
from penstock.runtime.devices.host_copies import fulfil

T = TypeVar("T")

DEFAULT_TIMEOUT_SECONDS = 600.0
GRACE_SECONDS = 60.0
"""The time by which a communicator's own timeout exceeds ours. Our error says more, so it must come first."""
POLL_SECONDS = 0.25
"""How often a waiting rank looks whether another rank has failed."""
SPIN_SECONDS = 250e-6, 2e-3
"""The least and the most that a waiter spins.

Waking a sleeping thread takes 50 to 100 us. If both sides sleep, short actions pay that twice. But if another process
needs the core, spinning delays the message.
"""
FAST_POLL_SECONDS = 1e-3
"""How often a rank polls the store for a single value, or its device for the end of an operation."""
_UNKNOWN = " It hangs, is stopped, or has left the training loop earlier than this rank."


@dataclass(slots=True)
class SpinPolicy:
    """Decides how long a waiter spins before it sleeps, or before a thread waits in its stead: longer if spinning has
    paid.
    """

    seconds: float = max(SPIN_SECONDS)

    def deadline(self) -> float:
        """The end of a spin that begins now, in seconds of ``time.perf_counter``."""
        return time.perf_counter() + self.seconds

    def update(self, hit: bool) -> bool:
        """Adapts to whether a message arrived during the spin, and returns `hit`."""
        least, most = SPIN_SECONDS
        self.seconds = min(2 * self.seconds, most) if hit else max(self.seconds / 2, least)
        return hit


@dataclass(frozen=True, slots=True)
class Timeout:
    """Ends the waits of a rank after `timeout_seconds`, when another rank reports a failure on `board`, or when the
    process that is waited for has ended.
    """

    board: FailureBoard
    timeout_seconds: float

    def deadline(self) -> float:
        """The end of a wait that begins now, in seconds of ``time.monotonic``."""
        return time.monotonic() + self.timeout_seconds

    def check(self, deadline: float, context: str, peers: Sequence[int]) -> None:
        """Raises `TransportError` if a rank has failed, or if `deadline` is over. `peers` and `context` name the
        ranks and the place in the error.
        """
        self.board.check()
        self.board.check_processes(peers, context)
        self.board.check_calls(peers)
        self.board.observer.waiting(context, peers)
        if time.monotonic() > deadline:
            self.board.failed = True
            raise TransportError(
                f"nothing came from {name_ranks(peers)} for {self.timeout_seconds:g} s ({context})."
                f"{self.board.describe(peers) or _UNKNOWN} Look at its log, or pass a larger timeout_seconds= if its "
                f"work may take that long{self.board.observer.explain()}"
            )

    def wait_for(self, came: Callable[[], bool], context: str, peers: Sequence[int]) -> None:
        """Polls until `came()` is true. Raises like `check` on failure or timeout."""
        deadline = self.deadline()
        while not came():
            self.check(deadline, context, peers)
            time.sleep(FAST_POLL_SECONDS)

    def run(self, work: Callable[[], T], context: str, peers: Sequence[int]) -> T:
        """Returns ``work()``, a call that may block for ever, such as a collective of PyTorch's. Raises like `check` on
        failure or timeout, and leaves the call to the thread that it runs on.
        """
        deadline = self.deadline()
        try:
            return run_bounded(work, context, lambda: self.check(deadline, context, peers))
        except RuntimeError as error:
            raise self.connection_error(context, peers, error) from error

    def connection_error(self, context: str, peers: Sequence[int], error: Exception) -> Exception:
        """Returns the error for a connection to one of `peers` that broke with `error`. Raises the cause instead if a
        rank has reported one.
        """
        return error if isinstance(error, PenstockError) else self.board.find_cause(peers, context, error)


def check_timeout(seconds: Any) -> float:
    """Returns `seconds`. Raises `PenstockError` unless they are a finite number above 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise PenstockError(
            f"timeout_seconds={seconds!r}: expected a finite number of seconds above 0, since a rank that waits for "
            "another one must end some time. Pass such a number, or leave it out for the default"
        )
    return float(seconds)


def run_bounded(work: Callable[[], T], context: str, check: Callable[[], None]) -> T:
    """Returns ``work()``, which runs on a thread. Meanwhile `check` is called now and then, and ends the wait if it
    raises; the thread then stays in the call. `context` names the thread.
    """
    done = Future[T]()
    threading.Thread(target=fulfil, args=(done, work), name=f"penstock {context}", daemon=True).start()
    while True:
        try:
            return done.result(POLL_SECONDS)
        except TimeoutError:
            if done.done():
                raise
            check()
