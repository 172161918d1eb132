"""Gathers values of all processes over the store at which they met, for a thread beside the one that trains.

A collective of ``torch.distributed`` would block in a thread until the process ends. This one looks at the store again
and again, and so ends soon when it is given up or another process has failed.
"""

import time
from collections.abc import Sequence
from typing import Any

from penstock.errors import TransportError
from penstock.runtime.transport.failures import FailureBoard
from penstock.runtime.transport.plain_values import decode_plain, encode_plain
from penstock.runtime.transport.store_watch import WatchedStore

_POLL_SECONDS = 0.01


class PatientGather:
    """Calls of it return the values of all processes, by rank; each waits at most `timeout_seconds`.

    The first call waits without an end until `hurry`: other processes may come to it only some steps later. `store`:
    for nothing else; None in a single process.
    """

    def __init__(
        self, store: WatchedStore | None, rank: int, ranks: int, *, board: FailureBoard | None, timeout_seconds: float
    ) -> None:
        self._store, self._rank, self._ranks, self._board = store, rank, ranks, board
        self._timeout_seconds = timeout_seconds
        self._round = 0
        self._hurried_at: float | None = None
        self._given_up = False

    def hurry(self) -> None:
        """From now on the first call, too, waits at most ``timeout_seconds``."""
        if self._hurried_at is None:
            self._hurried_at = time.monotonic()

    def give_up(self) -> None:
        """Makes the present call, and all later ones, raise `TransportError`."""
        self._given_up = True

    def has_failed(self) -> bool:
        """Whether this rank or another one has failed, so that none need be waited for. Called at the exit of the
        process.
        """
        if self._board is None:
            return False
        self._board.report_last_error()
        return self._board.failed or self._board.watch.failure is not None

    def __call__(self, value: Any) -> Sequence[Any]:
        if self._store is None:
            return [value]
        names = [f"{self._round}/{rank}" for rank in range(self._ranks)]
        try:
            self._store.set(names[self._rank], encode_plain(value).decode())
            self._wait(names)
            values = [decode_plain(self._store.get(name)) for name in names]
            # The store may be in the process of rank 0, which therefore leaves last.
            self._store.set(f"{names[self._rank]}/read", "")
            if self._rank == 0:
                self._wait([f"{name}/read" for name in names])
                self._store.delete([name for each in names for name in (each, f"{each}/read")])
        except RuntimeError as error:
            raise TransportError(
                "the store of torch.distributed cannot be reached while ranks save together: another rank has ended. "
                f"Look at the other ranks' logs. torch.distributed says: {error}"
            ) from error
        self._round += 1
        return values

    def _wait(self, names: list[str]) -> None:
        assert self._store is not None
        began, others = time.monotonic(), [rank for rank in range(self._ranks) if rank != self._rank]
        while not self._store.check(names):
            if self._given_up:
                raise TransportError("a save beside the training was given up: this pipeline has been closed")
            if self._board is not None:
                self._board.check()
                self._board.check_processes(others, "a save beside the training")
            since = self._hurried_at if self._round == 0 else began
            if since is not None and time.monotonic() - max(since, began) > self._timeout_seconds:
                missing = [rank for rank, name in enumerate(names) if not self._store.check([name])]
                raise TransportError(
                    f"rank {self._rank} has waited {self._timeout_seconds:.0f} s for rank(s) {missing} in a save "
                    "beside the training: expected all ranks to save together. Look at their logs, or raise "
                    "timeout_seconds"
                )
            time.sleep(_POLL_SECONDS)
