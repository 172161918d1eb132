"""Receives that have been posted: those that their inbox looks after when it is asked, and those of a thread."""

import threading
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from penstock.runtime.devices.staging import NOTHING, Staged, Staging
from penstock.runtime.transport.timeouts import POLL_SECONDS, Timeout
from penstock.runtime.transport.transport import Message

__all__ = ["PendingResult", "PostedReceive"]


class _Inbox(Protocol):
    """The receiving end of an edge."""

    def bring(self, ticket: Any) -> bool:
        """Gives `ticket` its message if it has come; whether it has one."""

    def await_(self, ticket: Any) -> None:
        """Waits for the message of `ticket` and gives it that."""


class PostedReceive:
    """A receive of a message of `form` that `inbox` will bring."""

    __slots__ = ("form", "inbox", "message")

    def __init__(self, inbox: _Inbox, form: Hashable) -> None:
        self.inbox, self.form = inbox, form
        self.message: Message | None = None

    def ready(self) -> bool:
        return self.inbox.bring(self)

    def wait(self) -> Message:
        if self.message is None:
            self.inbox.await_(self)
        assert self.message is not None
        return self.message


class PendingResult:
    """A message from `peers` on its way, which a thread will `leave` here, having brought it over by `staging`."""

    __slots__ = ("_empty", "_error", "_message", "_patience", "_peers", "_place", "_staged", "_staging")

    def __init__(self, place: str, peers: Sequence[int], timeout: Timeout, staging: Staging) -> None:
        self._place, self._peers, self._patience = place, peers, timeout
        self._staging, self._staged = staging, NOTHING
        self._message: Message | None = None
        self._error: Exception | None = None
        # Held until the message is there. An event does the same with a lock of its own for every waiter.
        self._empty = threading.Lock()
        self._empty.acquire()

    def leave(self, staged: Staged = NOTHING, error: Exception | None = None) -> None:
        """Called once, with what has come or why nothing will."""
        self._staged, self._error = staged, error
        self._empty.release()

    def ready(self) -> bool:
        return not self._empty.locked()

    def wait(self) -> Message:
        if self._empty.locked():
            deadline = self._patience.deadline()
            while not self._empty.acquire(timeout=POLL_SECONDS):
                self._patience.check(deadline, self._place, self._peers)
            # For who asks again.
            self._empty.release()
        if self._error is not None:
            raise self._patience.broken(self._place, self._peers, self._error)
        if self._message is None:
            self._message, self._staged = tuple(self._staging.follow(self._staged)), NOTHING
        return self._message
