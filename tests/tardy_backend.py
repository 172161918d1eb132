"""A backend of ``torch.distributed`` that sends between processes as NCCL does: each message when the other side has
told of it, known to be done a while later, and broken off by whoever aborts it. Underneath is Gloo.

It stands in for NCCL where there is no GPU. A stream that waits for a message is the thread here, since a CPU computes
at once what it is told.
"""

import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["BACKEND", "messages", "register"]

BACKEND = "tardy"
LATE = 2e-4
"""Seconds between the end of a message and its being known."""


class _Work:
    """A message on its way."""

    def __init__(self, inner: dist.Work, group: "_Group") -> None:
        self._group = group
        self._done = threading.Event()
        self._error: Exception | None = None
        threading.Thread(target=self._settle, args=(inner,), daemon=True).start()

    def _settle(self, inner: dist.Work) -> None:
        try:
            inner.wait()
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

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.aborted = threading.Event()

    def getBackendName(self) -> str:
        return BACKEND

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> _Work:
        _Group.sent += 1
        return _Work(self._inner.send(tensors, dst, tag), self)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> _Work:
        return _Work(self._inner.recv(tensors, src, tag), self)

    def allgather(self, *arguments: Any) -> _Work:
        return _Work(self._inner.allgather(*arguments), self)

    def alltoall_base(self, *arguments: Any) -> _Work:
        return _Work(self._inner.alltoall_base(*arguments), self)

    def abort(self) -> None:
        self.aborted.set()


def messages() -> int:
    """How many this process has sent."""
    return _Group.sent


def register() -> None:
    """Makes it known to ``torch.distributed`` in this process."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _Group, devices="cpu")
