"""All ranks stop before the same step when one of them is asked to, without a message in any other step.

A scheduler may send its signal to one rank only, and ranks may be steps apart. A thread of each rank looks in the store
whether a rank is asked to stop. When one is:

  1. The thread writes how many steps its main thread has begun, and lets it begin only one more.
  2. When all threads have written, the main threads go on to the step after the furthest one, and stop before it.

A main thread waits only for threads, and these wait for no main thread, so there is no deadlock. No main thread has
gone past the chosen step, since none may begin more than one step in between.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

from penstock.errors import TransportError

__all__ = ["StopAgreement"]

_POLL_SECONDS = 0.2
_JOIN_SECONDS = 1.0
_REASON = "stop"


class StopAgreement:
    """Finds the step before which all `ranks` stop. `store` is their own; None for a single process. `steps`: those
    that were trained before.
    """

    def __init__(self, store: Store | None, rank: int, ranks: int, steps: int) -> None:
        self._store, self._rank, self._ranks, self._first = store, rank, ranks, steps
        self._asked = 0
        self._changed = threading.Condition()
        self._begun = steps
        """How many steps the main thread has begun."""
        self._limit: int | None = None
        """The step that the main thread must not begin before the decision."""
        self._stop: int | None = None
        """The step that all stop before."""
        self._reason = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock stops", daemon=True)
        if store is not None:
            self._thread.start()

    def ask(self, reason: int) -> None:
        """Asks all ranks to stop for `reason`, a number above 0. It takes no lock: a signal handler may call it."""
        self._asked = self._asked or reason

    def begin(self, step: int, check: Callable[[], None], timeout_seconds: float) -> int:
        """Returns the reason if all ranks stop before `step`, or 0: then the step begins.

        It waits for the other ranks only when one of them was asked to stop. `check` raises if one has failed;
        `TransportError` after `timeout_seconds`.
        """
        if self._store is None and self._asked:
            # What was loaded is saved already.
            self._stop, self._reason = max(step, self._first + 1), self._asked
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self._limit is not None and self._stop is None and step >= self._limit:
                self._changed.wait(_POLL_SECONDS)
                check()
                if time.monotonic() > deadline:
                    raise TransportError(
                        f"rank {self._rank} was to stop before a step that all ranks agree on, before step {step}: "
                        f"expected an answer of every rank within {timeout_seconds:g} s, and found that some did not "
                        "answer. They hang, are stopped or have left the training loop: look at their logs"
                    )
            if self._stop is not None and step >= self._stop:
                return self._reason
            self._begun = step + 1
            return 0

    def close(self) -> None:
        """Ends the thread. Ranks that are asked to stop later need not wait for this one."""
        self._closed.set()
        if self._store is not None:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        assert self._store is not None
        # If the store is gone, its process has ended. The steps meet that.
        with suppress(RuntimeError):
            store = _connected_anew(self._store)
            asked = self._wait_until_asked(store)
            with self._changed:
                self._limit = self._begun + 1
                begun = self._begun
            store.set(_begun(self._rank), str(begun))
            if asked:
                self._decide(store)

    def _wait_until_asked(self, store: Store) -> bool:
        """Waits until a rank is asked to stop; False if the pipeline closes before."""
        while not self._closed.wait(_POLL_SECONDS):
            if self._asked:
                store.compare_set(_REASON, "", str(self._asked))
            if store.check([_REASON]):
                return True
        return False

    def _decide(self, store: Store) -> None:
        keys = [_begun(rank) for rank in range(self._ranks)]
        while not store.check(keys):
            if self._closed.wait(_POLL_SECONDS / 4):
                return
        furthest = max(int(store.get(key)) for key in keys)
        with self._changed:
            self._reason = int(store.get(_REASON))
            self._stop = furthest + 1
            self._changed.notify_all()


def _begun(rank: int) -> str:
    return f"begun/{rank}"


def _connected_anew(store: Store) -> Store:
    """A connection of its own to `store`: calls of one connection wait for each other."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError, TypeError):
        # Not every kind of store has it.
        return store
