"""The first failure of a run, reported to every rank.

A rank that fails writes what happened to the store at which the processes met. The others look there whenever they have
waited for a while, so an error ends all of them within seconds and each shows its cause, also where the failed process
catches its exception and lives on. A process that was killed cannot write; then the connection that it leaves broken is
all the evidence there is.
"""

import contextlib
import json
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from penstock.errors import PenstockError, TransportError
from penstock.runtime.transport.wait_observers import WaitObserver

__all__ = ["FailureBoard", "explained"]

_FAILURE = "failure"
_READERS = "failure-readers"


class FailureBoard:
    """The place where the ranks of one pipeline report that they failed."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._reachable = True
        self.observer = WaitObserver()
        self.failed = False
        """Whether this rank has failed or knows of one that has."""

    def report(self, place: str, traceback: str, linger_seconds: float = 3.0) -> None:
        """Tells the other ranks that this one failed at `place`. Only the first report of a run counts.

        Stays for up to `linger_seconds` until all have read it, since the store may live in this process.
        """
        knew, self.failed = self.failed, True
        record = json.dumps({"rank": self._rank, "place": place, "traceback": traceback})
        if not self._reachable:
            return
        # The process that holds a store that cannot be reached is gone. A report would reach no process.
        with contextlib.suppress(RuntimeError):
            if json.loads(self._store.compare_set(_FAILURE, "", record))["rank"] != self._rank:
                # The first one waits for its readers, and need not wait for who has failed by itself.
                if not knew:
                    self._store.add(_READERS, 1)
                return
            deadline = time.monotonic() + linger_seconds
            while time.monotonic() < deadline and self._store.add(_READERS, 0) < self._ranks - 1:
                time.sleep(0.02)

    def check(self) -> None:
        """Raises `TransportError` with the failed rank's traceback if another rank has reported a failure."""
        if not self._reachable:
            return
        try:
            if not self._store.check([_FAILURE]):
                return
            record = json.loads(self._store.get(_FAILURE))
            if record["rank"] == self._rank:
                return
            if not self.failed:
                self._store.add(_READERS, 1)
        except RuntimeError:
            # The store went down with its process; the broken connection to that process tells the rest. It is not
            # asked again, since torch prints a long warning each time.
            self._reachable = False
            return
        self.failed = True
        raise TransportError(
            f"rank {record['rank']} failed {record['place']}, so rank {self._rank} stops too. Correct the error below, "
            f"which is rank {record['rank']}'s, and start again:\n{record['traceback']}"
        )


def explained(error: BaseException, stage: int) -> BaseException:
    """`error`, or what it means if it is one of a connection inside of `stage`, which names a socket."""
    if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
        return error
    if isinstance(error, PenstockError):
        return error
    return TransportError(
        f"the connection to another process of stage {stage} broke in a collective of PyTorch's: that process failed, "
        f"died or left the training loop earlier. Look at its log. torch.distributed says: {error}"
    )
