"""Communicators between processes that behave like NCCL's, over Gloo. A message is sent when both ends have enqueued
it, is known to be done only a while later, and ends when either end aborts. Operations of a communicator run one after
the other, except for sends and receives that are merged into one.

They replace NCCL in tests. Instead of a stream, the thread waits for a message, since a CPU executes work at once.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, cast

from penstock.runtime.devices.communicators import Communicator, Members, connect_gloo

LATE = 2e-4
"""Seconds between the end of a message and the time when that is known."""
Begin: TypeAlias = Callable[[], Any]
LIVE: list["TardyCommunicator"] = []
"""The communicators of this process that have been made and not released."""


class _Work:
    """An operation, which starts the calls in `begin` after `previous`."""

    def __init__(self, begin: Sequence[Begin], group: "TardyCommunicator", previous: "_Work | None") -> None:
        self._group = group
        self._done = threading.Event()
        threading.Thread(target=self._settle, args=(begin, previous), daemon=True).start()

    def _settle(self, begin: Sequence[Begin], previous: "_Work | None") -> None:
        if previous is not None:
            previous._done.wait()
        try:
            for work in [part() for part in begin]:
                work.wait()
            time.sleep(LATE)
        except RuntimeError as error:
            # An operation that has failed is complete, as in PyTorch.
            self._group.error = str(error)
        self._done.set()

    def is_completed(self) -> bool:
        return self._group.aborted.is_set() or self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        # A GPU waits for a failed operation until the communicator is aborted.
        while not self._group.aborted.is_set() and (self._group.error or not self._done.is_set()):
            self._done.wait(0.01)
            time.sleep(0.01 if self._group.error else 0.0)
        return True


class TardyCommunicator:
    """One process's end of a communicator."""

    supports_coalescing = True
    sent = 0
    """The number of messages of this process."""

    def __init__(self, members: Members) -> None:
        self.name = members.name
        self._inner: Any = connect_gloo(members)
        self.aborted = threading.Event()
        self.error = ""
        self._last: _Work | None = None
        self._together: list[Begin] | None = None
        """The calls that will be merged into one operation."""
        LIVE.append(self)

    def send(self, *arguments: Any) -> _Work | None:
        TardyCommunicator.sent += 1
        return self._do(partial(self._inner.send, *arguments))

    def recv(self, *arguments: Any) -> _Work | None:
        return self._do(partial(self._inner.recv, *arguments))

    def _allgather_base(self, *arguments: Any) -> _Work | None:
        return self._do(partial(self._inner._allgather_base, *arguments))

    def alltoall_base(self, *arguments: Any) -> _Work | None:
        return self._do(partial(self._inner.alltoall_base, *arguments))

    def _start_coalescing(self) -> None:
        assert self._together is None
        self._together = []

    def _end_coalescing(self) -> _Work:
        assert self._together
        together, self._together = self._together, None
        self._last = _Work(together, self, self._last)
        return self._last

    def _do(self, begin: Begin) -> _Work | None:
        """Returns None for a call that will be merged into another operation."""
        if self._together is not None:
            self._together.append(begin)
            return None
        self._last = _Work([begin], self, self._last)
        return self._last

    def abort(self) -> None:
        self.aborted.set()

    def shutdown(self) -> None:
        LIVE.remove(self)


def connect(members: Members) -> Communicator:
    """Makes a communicator of `members`."""
    return cast(Communicator, TardyCommunicator(members))


def failure_of(communicator: Any) -> str:
    """Describes what broke the communicator; empty if nothing did."""
    assert isinstance(communicator, TardyCommunicator)
    return communicator.error


def messages() -> int:
    """The number of messages that this process has sent."""
    return TardyCommunicator.sent
