"""How long this rank waits for others, and the errors when it stops waiting."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.errors import TransportError
from penstock.runtime.transport.failures import FailureBoard

__all__ = ["FAST_POLL_SECONDS", "POLL_SECONDS", "SpinPolicy", "Timeout"]

POLL_SECONDS = 0.25
"""How often a waiting rank looks whether another rank has failed."""
SPIN_SECONDS = 250e-6, 2e-3
"""The least and the most that a waiter spins.

Waking a sleeping thread takes 50 to 100 us. If both sides sleep, short actions pay that twice. But if another process
needs the core, spinning delays the message.
"""
FAST_POLL_SECONDS = 1e-3
"""How often a rank polls the store for a single value, or its device for the end of an operation."""
_CAUSE_SECONDS = 2.0
"""A broken connection is often noticed before its cause has been written to the store."""


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
    """Ends the waits of a rank after `timeout_seconds`, or when another rank reports a failure on `board`."""

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
        self.board.observer.waiting(context, peers)
        if time.monotonic() > deadline:
            self.board.failed = True
            raise TransportError(
                f"nothing came from {_named(peers)} for {self.timeout_seconds:g} s ({context}). It "
                "hangs, is stopped, or has left the training loop earlier than this rank: look at its log, or "
                f"pass a larger timeout_seconds= if its work may take that long{self.board.observer.explain()}"
            )

    def wait_for(self, came: Callable[[], bool], context: str, peers: Sequence[int]) -> None:
        """Polls until `came()` is true. Raises like `check` on failure or timeout."""
        deadline = self.deadline()
        while not came():
            self.check(deadline, context, peers)
            time.sleep(FAST_POLL_SECONDS)

    def connection_error(self, context: str, peers: Sequence[int], error: Exception) -> Exception:
        """Returns the error for a connection to one of `peers` that broke with `error`. Raises the cause instead if a
        rank has reported one.
        """
        if isinstance(error, TransportError):
            return error
        deadline = time.monotonic() + _CAUSE_SECONDS
        while time.monotonic() < deadline:
            self.board.check()
            time.sleep(0.05)
        self.board.failed = True
        result = TransportError(
            f"{_named(peers)} closed its connection to this rank ({context}). It was probably killed (out of memory?) "
            f"or left the training loop earlier: look at its log. The connection says: {error}"
        )
        result.__cause__ = error
        return result


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "one of the ranks " + ", ".join(map(str, ranks))
