"""A backend of ``torch.distributed`` that sends between processes as NCCL does: each message when the other side has
told of it, known to be done a while later, and broken off by whoever aborts it. What a group is told begins when all is
over that it was told before, but for sends and receives that are made one operation. Underneath is Gloo.

It stands in for NCCL where there is no GPU. A stream that waits for a message is the thread here, since a CPU computes
at once what it is told.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

__all__ = ["BACKEND", "messages", "register"]

BACKEND = "tardy"
LATE = 2e-4
"""Seconds between the end of a message and its being known."""
Begin: TypeAlias = Callable[[], dist.Work]


class _Work:
    """An operation on its way, which `begin` begins, part by part, after `previous`."""

    def __init__(self, begin: Sequence[Begin], group: "_Group", previous: "_Work | None") -> None:
        self._group = group
        self._done = threading.Event()
        self._error: Exception | None = None
        threading.Thread(target=self._settle, args=(begin, previous), daemon=True).start()

    def _settle(self, begin: Sequence[Begin], previous: "_Work | None") -> None:
        if previous is not None:
            previous._done.wait()
        try:
            for work in [part() for part in begin]:
                work.wait()
            time.sleep(LATE)
        except RuntimeError as error:
            self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        # What has failed is never done, as on a GPU.
        return self._group.aborted.is_set() or (self._done.is_set() and self._error is None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        while not self.is_completed():
            self._done.wait(0.01)
            if self._error is not None:
                time.sleep(0.01)
        return True


class _Group(dist.ProcessGroup):
    """Of two ranks or more."""

    sent = 0
    """Messages of this process."""
    supports_coalescing = True

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.aborted = threading.Event()
        self._last: _Work | None = None
        self._together: list[Begin] | None = None
        """What is to become one operation."""

    def getBackendName(self) -> str:
        return BACKEND

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> _Work | None:
        _Group.sent += 1
        return self._do(partial(self._inner.send, tensors, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> _Work | None:
        return self._do(partial(self._inner.recv, tensors, src, tag))

    def allgather(self, *arguments: Any) -> _Work | None:
        return self._do(partial(self._inner.allgather, *arguments))

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
        """None for what is to be a part of another operation."""
        if self._together is not None:
            self._together.append(begin)
            return None
        self._last = _Work([begin], self, self._last)
        return self._last

    def abort(self) -> None:
        self.aborted.set()


def messages() -> int:
    """How many this process has sent."""
    return _Group.sent


def register() -> None:
    """Makes it known to ``torch.distributed`` in this process."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _Group, devices="cpu")
