"""How long this rank waits for another one, and what it says when it waits no more."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.errors import TransportError
from penstock.runtime.transport.failures import FailureBoard

__all__ = ["POLL_SECONDS", "TELLING_SECONDS", "SpinPolicy", "Timeout"]

POLL_SECONDS = 0.25
"""How often a rank that waits looks whether another one has failed."""
LOOKING_SECONDS = 250e-6, 2e-3
"""At least and at most.

A sleeper is awake again some 50 to 100 us after it was told, and who waits for it would sleep, too: with short actions
that would go back and forth. But where somebody else needs the core, looking keeps the message from coming.
"""
TELLING_SECONDS = 1e-3
"""How often a rank looks for what another one tells once, or whether its device is done."""
_CAUSE_SECONDS = 2.0
"""A broken connection is often noticed before its cause has been written down."""


@dataclass(slots=True)
class SpinPolicy:
    """How long a rank looks for a message before it sleeps, or a thread waits in its place: longer where that has been
    worth it.
    """

    seconds: float = max(LOOKING_SECONDS)

    def until(self) -> float:
        """When a look that begins now is over, in seconds of ``time.perf_counter``."""
        return time.perf_counter() + self.seconds

    def learn(self, came: bool) -> bool:
        """Takes note of whether the message `came` in that time; whether it did."""
        least, most = LOOKING_SECONDS
        self.seconds = min(2 * self.seconds, most) if came else max(self.seconds / 2, least)
        return came


@dataclass(frozen=True, slots=True)
class Timeout:
    """Of a rank that waits `timeout_seconds` for its peers, unless `board` says that one of them failed."""

    board: FailureBoard
    timeout_seconds: float

    def deadline(self) -> float:
        """When a wait that begins now is over, in seconds of ``time.monotonic``."""
        return time.monotonic() + self.timeout_seconds

    def check(self, deadline: float, place: str, peers: Sequence[int]) -> None:
        """Raises `TransportError` if a rank has failed, or if it is later than `deadline` and nothing has come from
        `peers` at `place`.
        """
        self.board.check()
        if time.monotonic() > deadline:
            self.board.failed = True
            raise TransportError(
                f"nothing came from {_named(peers)} for {self.timeout_seconds:g} s ({place}). It "
                "hangs, is stopped, or has left the training loop earlier than this rank: look at its log, or "
                "pass a larger timeout_seconds= if its work may take that long"
            )

    def wait_for(self, came: Callable[[], bool], place: str, peers: Sequence[int]) -> None:
        """Looks again and again whether what `peers` tell at `place` `came`; raises what `check` does."""
        deadline = self.deadline()
        while not came():
            self.check(deadline, place, peers)
            time.sleep(TELLING_SECONDS)

    def broken(self, place: str, peers: Sequence[int], error: Exception) -> Exception:
        """The error for a connection to one of `peers` that broke with `error`. Raises the cause instead if a rank
        tells it.
        """
        if isinstance(error, TransportError):
            return error
        deadline = time.monotonic() + _CAUSE_SECONDS
        while time.monotonic() < deadline:
            self.board.check()
            time.sleep(0.05)
        self.board.failed = True
        result = TransportError(
            f"{_named(peers)} closed its connection to this rank ({place}). It was probably killed (out of memory?) or "
            f"left the training loop earlier: look at its log. The connection says: {error}"
        )
        result.__cause__ = error
        return result


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "one of the ranks " + ", ".join(map(str, ranks))
