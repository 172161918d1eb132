"""Receives that have been posted, and results that a thread will deliver."""

import threading
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from penstock.runtime.collectives.timeouts import POLL_SECONDS, Timeout
from penstock.runtime.devices.staging import NOTHING_STAGED, Staged, Staging
from penstock.runtime.transport.transport import Message


class _Inbox(Protocol):
    """The receiving end of an edge, which delivers messages when it is asked for them."""

    def poll(self, receive: Any) -> bool:
        """Delivers the message of `receive` if it has arrived. Returns whether `receive` has its message."""

    def wait(self, receive: Any) -> None:
        """Blocks until the message of `receive` is delivered."""


class PostedReceive:
    """A receive of a message of `kind` from `inbox`. Once the message is read, it holds the message alone."""

    __slots__ = ("inbox", "kind", "message")

    def __init__(self, inbox: _Inbox, kind: Hashable) -> None:
        self.inbox: _Inbox | None = inbox
        self.kind = kind
        self.message: Message | None = None

    def ready(self) -> bool:
        inbox = self.inbox
        return inbox is None or inbox.poll(self)

    def wait(self) -> Message:
        inbox = self.inbox
        if inbox is not None:
            if self.message is None:
                inbox.wait(self)
            # A user may keep a loss for longer than the pipeline, whose communicators should not stay with it.
            self.inbox = None
        assert self.message is not None
        return self.message


class PendingResult:
    """A message from `peers`, or a sum, that a thread will deliver by `complete`. `staging` brings its tensors to the
    current stream.
    """

    __slots__ = ("_context", "_empty", "_error", "_message", "_peers", "_staged", "_staging", "_timeout")

    def __init__(self, context: str, peers: Sequence[int], timeout: Timeout, staging: Staging) -> None:
        self._context, self._peers, self._timeout = context, peers, timeout
        self._staging, self._staged = staging, NOTHING_STAGED
        self._message: Message | None = None
        self._error: Exception | None = None
        # The lock is held until the message has been delivered. A `threading.Event` would do the same with one more
        # lock for each waiter.
        self._empty = threading.Lock()
        self._empty.acquire()

    def complete(self, staged: Staged = NOTHING_STAGED, error: Exception | None = None) -> None:
        """Delivers the tensors, or the error that keeps them from coming. Called once."""
        self._staged, self._error = staged, error
        self._empty.release()

    def ready(self) -> bool:
        return not self._empty.locked()

    def wait(self) -> Message:
        if self._empty.locked():
            deadline = self._timeout.deadline()
            while not self._empty.acquire(timeout=POLL_SECONDS):
                self._timeout.check(deadline, self._context, self._peers)
            # Released again, so that a later `wait` returns at once.
            self._empty.release()
        if self._error is not None:
            raise self._timeout.connection_error(self._context, self._peers, self._error)
        if self._message is None:
            self._message, self._staged = tuple(self._staging.wait_for(self._staged)), NOTHING_STAGED
        return self._message
