"""A value of each of some ranks on all of them, exchanged at the store where the ranks have met.

A collective of a communicator would be faster for large values, but it cannot be left when a rank does not come, it
does not tell which one, and it breaks with an error that names a socket. What is gathered is small: digests, plans,
names, timings.

Invariants of this file:
  1. The n-th gathers of all ranks belong together.
  2. A value travels with its context, so that what belongs to two different calls is an error, and no value.
  3. Nothing piles up: when all ranks have come to gather n, each has read gather n - 1, whose keys are then deleted.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed.distributed_c10d import Store

from penstock.errors import TransportError
from penstock.runtime.collectives.failures import SAME_CALLS
from penstock.runtime.collectives.store_watch import StoreUnreachable
from penstock.runtime.collectives.timeouts import POLL_SECONDS, Timeout
from penstock.runtime.files.plain_values import decode_plain, encode_plain

_POLL_SECONDS = 1e-3, 20e-3
"""How often a rank looks whether the others have come: at first, and in the end."""


class StoreGather:
    """Gathers values of `ranks`, of which this process is `rank`. Waits end as `timeout` says. `name`: no other gather
    has it.
    """

    def __init__(self, name: str, rank: int, ranks: Sequence[int], timeout: Timeout) -> None:
        self.rank, self.ranks = rank, tuple(ranks)
        self.others = [other for other in ranks if other != rank]
        self._name, self._timeout, self._watch = name, timeout, timeout.board.watch
        self._number = 0

    def __call__(self, value: Any, context: str) -> Sequence[Any]:
        """Returns the plain `value` of every rank, in their order. `context` says what for. Collective.

        `TransportError` if a rank has failed, does not come in time, or has come with another context.
        """
        number, self._number = self._number, self._number + 1
        try:
            found = self._exchange(encode_plain((context, value)), number, context)
        except StoreUnreachable as error:
            raise self._timeout.connection_error(context, self.others, error) from error
        for rank, (other, _) in zip(self.ranks, found, strict=True):
            if other != context:
                self._timeout.board.failed = True
                raise TransportError(
                    f"the ranks are out of step: rank {self.rank} exchanges values {context}, and rank {rank} {other}. "
                    f"{SAME_CALLS}"
                )
        return [own for _, own in found]

    def _exchange(self, data: bytes, number: int, context: str) -> Sequence[Any]:
        keys = self._keys(number)
        self._ask(lambda store: store.set(keys[self.rank], data.decode()))
        self._wait(keys, context)
        if number:
            self._watch.submit(lambda store: delete_keys(store, [self._keys(number - 1)[self.rank]]))
        return [decode_plain(found) for found in self._ask(lambda store: [store.get(key) for key in keys.values()])]

    def _keys(self, number: int) -> dict[int, str]:
        """By rank, the key of its value."""
        return {rank: f"{self._name}gather {number}/{rank}" for rank in self.ranks}

    def _wait(self, keys: Mapping[int, str], context: str) -> None:
        """Waits until all of `keys` are written."""
        began, (pause, longest) = time.monotonic(), _POLL_SECONDS
        checked = began
        while not self._ask(lambda store: store.check(list(keys.values()))):
            time.sleep(pause)
            pause = min(1.2 * pause, longest)
            if time.monotonic() > checked + POLL_SECONDS:
                self._check(began, context, keys)
                checked = time.monotonic()

    def _check(self, began: float, context: str, keys: Mapping[int, str]) -> None:
        """Raises `TransportError` if the wait for `keys`, or for the store without keys, which `began` then, is to
        end.
        """
        self._timeout.check(began + self._timeout.timeout_seconds, context, self._missing(keys) or self.others)
        board = self._timeout.board
        for rank in self.others if keys else ():
            # What a rank wrote before it left, or began a later call, is there by now.
            left, ahead = board.has_left(rank), board.is_ahead(rank)
            if (left or ahead) and rank in self._missing(keys):
                if not left:
                    raise board.apart(rank, f"exchanges values {context}")
                board.failed = True
                raise TransportError(f"rank {rank} does not come ({context}). {board.describe_left([rank])}")

    def _missing(self, keys: Mapping[int, str]) -> list[int]:
        """The ranks whose `keys` are not written."""
        if not keys:
            return []
        return list(self._ask(lambda store: [rank for rank, key in keys.items() if not store.check([key])]))

    def _ask(self, call: Any) -> Any:
        """What the store answers. Raises like `_check` if another rank fails, or the store does not answer."""
        future, began = self._watch.submit(call), time.monotonic()
        while True:
            try:
                return future.result(POLL_SECONDS)
            except TimeoutError:
                if future.done():
                    raise
                self._check(began, "an answer of the store", {})


class PatientGather(StoreGather):
    """Gathers values for a thread beside the one that trains.

    The first gather waits without an end until `hurry`: other processes may come to it only some steps later.
    """

    _hurried_at: float | None = None
    _given_up = False

    def hurry(self) -> None:
        """From now on the first gather, too, ends as the timeout says."""
        if self._hurried_at is None:
            self._hurried_at = time.monotonic()

    def give_up(self) -> None:
        """Makes the present call, and all later ones, raise `TransportError`."""
        self._given_up = True

    def has_failed(self) -> bool:
        """Whether this rank or another one has failed, so that none need be waited for. Called at the exit of the
        process.
        """
        board = self._timeout.board
        board.report_last_error()
        return board.failed or board.watch.failure is not None

    def __call__(self, value: Any, context: str = "") -> Sequence[Any]:
        return super().__call__(value, context or "a save beside the training")

    def _exchange(self, data: bytes, number: int, context: str) -> Sequence[Any]:
        values, keys = super()._exchange(data, number, context), self._keys(number)
        # The store may be in the process of rank 0, which therefore leaves last.
        read = {rank: f"{key}/read" for rank, key in keys.items()}
        self._ask(lambda store: store.set(read[self.rank], ""))
        if self.rank == 0:
            self._wait(read, context)
            self._watch.submit(lambda store: delete_keys(store, [*keys.values(), *read.values()]))
        return values

    def _check(self, began: float, context: str, keys: Mapping[int, str]) -> None:
        if self._given_up:
            raise TransportError("a save beside the training was given up: this pipeline has been closed")
        self._timeout.board.check()
        self._timeout.board.check_processes(self.others, context)
        since, limit = self._hurried_at if self._number == 1 else began, self._timeout.timeout_seconds
        if since is not None and time.monotonic() - max(since, began) > limit:
            awaited = f"rank(s) {self._missing(keys)}" if keys else "an answer of the store"
            raise TransportError(
                f"rank {self.rank} has waited {limit:.0f} s for {awaited} in {context}: expected all ranks to save "
                "together. Look at their logs, or raise timeout_seconds"
            )


def delete_keys(store: Store, keys: Sequence[str]) -> None:
    """Deletes `keys`, if `store` is able to."""
    with suppress(RuntimeError):
        for key in keys:
            store.delete_key(key)
