"""A value of every rank on every rank, exchanged at the store where the ranks have met.

A collective of a communicator would be faster for large values, but it cannot be left when a rank does not come, it
does not tell which one, and it breaks with an error that names a socket. What is gathered is small: digests, plans,
names, timings.

Invariants of this file:
  1. The n-th gathers of all ranks belong together.
  2. Nothing piles up: when all ranks have come to gather n, each has read gather n - 1, whose keys are then deleted.
"""

import hashlib
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch.distributed.distributed_c10d import Store

from penstock.errors import TransportError
from penstock.runtime.transport.plain_values import decode_plain, encode_plain
from penstock.runtime.transport.store_watch import StoreUnreachable, StoreWatch
from penstock.runtime.transport.timeouts import POLL_SECONDS, Timeout

_WHOLE_BYTES = 256
"""Larger values are written under their digest. A rank reads each of them once, and its own, which often is that of all
the others, never."""
_POLL_SECONDS = 1e-3, 20e-3
"""How often a rank looks whether the others have come: at first, and in the end."""


class StoreGather:
    """Gathers values of the `ranks` ranks through `watch`; this process is `rank`. Waits end as `timeout` says."""

    def __init__(self, watch: StoreWatch, rank: int, ranks: int, timeout: Timeout) -> None:
        self._watch, self._rank, self._ranks, self._timeout = watch, rank, ranks, timeout
        self._others = [other for other in range(ranks) if other != rank]
        self._number = 0
        self._written: list[str] = []
        """The keys that this rank has written for the last gather."""

    def __call__(self, value: Any, context: str) -> Sequence[Any]:
        """Returns the plain `value` of every rank, by rank. `context` says what for. Collective.

        `TransportError` if a rank has failed or does not come in time: it names those that are missing.
        """
        number, self._number = self._number, self._number + 1
        keys = [f"gather {number}/{rank}" for rank in range(self._ranks)]
        entry, data = _entry_of(encode_plain(value))
        try:
            written, self._written = self._written, self._write(keys[self._rank], number, entry, data)
            self._wait(keys, context)
            entries = self._ask(lambda store: [store.get(key) for key in keys])
            self._watch.submit(lambda store: _delete(store, written))
            large = {found for found in entries if found != entry and not found.startswith(b"=")}
            contents = {found: self._ask(_getter(_content_key(number, found))) for found in sorted(large)}
        except StoreUnreachable as error:
            raise self._timeout.connection_error(context, self._others, error) from error
        contents[entry] = data
        return [decode_plain(contents.get(found, found[1:])) for found in entries]

    def _write(self, key: str, number: int, entry: bytes, data: bytes) -> list[str]:
        """Writes this rank's value; returns the keys that it has written."""
        content = [_content_key(number, entry)] if not entry.startswith(b"=") else []

        def write(store: Store) -> None:
            for name in content:
                store.set(name, data.decode())
            store.set(key, entry.decode())

        self._ask(write)
        return [key, *content]

    def _wait(self, keys: Sequence[str], context: str) -> None:
        """Waits until all of `keys` are written."""
        deadline, (pause, longest) = self._timeout.deadline(), _POLL_SECONDS
        checked = time.monotonic()
        while not self._ask(lambda store: store.check(keys)):
            time.sleep(pause)
            pause = min(1.2 * pause, longest)
            if time.monotonic() > checked + POLL_SECONDS:
                self._timeout.check(deadline, context, self._missing(keys))
                self._check_left(keys, context)
                checked = time.monotonic()

    def _missing(self, keys: Sequence[str]) -> Sequence[int]:
        """The ranks that have not come; all others if the last one comes just now."""
        found = self._ask(lambda store: [store.check([key]) for key in keys])
        return [rank for rank, there in enumerate(found) if not there] or self._others

    def _check_left(self, keys: Sequence[str], context: str) -> None:
        """Raises `TransportError` if a rank has left without a value: what it wrote before it left is there by now."""
        board = self._timeout.board
        left = [rank for rank in self._others if board.has_left(rank)]
        gone = [rank for rank in left if not self._ask(lambda store, key=keys[rank]: store.check([key]))]
        if gone:
            board.failed = True
            raise TransportError(f"rank {gone[0]} does not come ({context}). {board.describe_left(gone)}")

    def _ask(self, call: Any) -> Any:
        """What the store answers. Raises like the timeout if another rank fails, or the store does not answer."""
        future, deadline = self._watch.submit(call), self._timeout.deadline()
        while True:
            try:
                return future.result(POLL_SECONDS)
            except TimeoutError:
                if future.done():
                    raise
                self._timeout.check(deadline, "an answer of the store", self._others)


def _entry_of(data: bytes) -> tuple[bytes, bytes]:
    """What is written for `data`: itself if it is short, else its digest."""
    return (b"=" + data if len(data) <= _WHOLE_BYTES else hashlib.sha256(data).hexdigest().encode()), data


def _content_key(number: int, entry: bytes) -> str:
    return f"gathered {number} {entry.decode()}"


def _getter(key: str) -> Any:
    return lambda store: store.get(key)


def _delete(store: Store, keys: Sequence[str]) -> None:
    # A store need not be able to delete.
    with suppress(RuntimeError):
        for key in keys:
            store.delete_key(key)
