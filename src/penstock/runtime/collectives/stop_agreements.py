"""All ranks stop before the same step when one of them is asked to, without a message in any other step.

A scheduler may send its signal to one rank only, and ranks may be steps apart. The thread of each rank that calls the
store looks whether a rank is asked to stop. When one is:

  1. The thread writes how many steps its main thread has begun, or is about to, and lets it begin only one more.
  2. When all threads have written, the main threads go on to the step after the furthest one, and stop before it.

A main thread waits only for threads, and these wait for no main thread, so there is no deadlock. No main thread has
gone past the chosen step, since none may begin more than one step in between.
"""

import threading
import time
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from penstock.errors import TransportError
from penstock.runtime.collectives.store_watch import StoreWatch

_POLL_SECONDS = 0.1
_REASON = "stop"


class StopAgreement:
    """Finds the step before which all `ranks` stop. `watch`: calls the store of all; None for a single process.
    `steps`: those that were trained before.
    """

    def __init__(self, watch: StoreWatch | None, rank: int, ranks: int, steps: int) -> None:
        self._watch, self._rank, self._ranks = watch, rank, ranks
        self.asked = 0
        """The reason of this rank to stop, if it has one."""
        self._changed = threading.Condition()
        self._begun = steps
        """How many steps the main thread may have begun; it begins the first one without a question."""
        self._limit: int | None = None
        """The step that the main thread must not begin before the decision."""
        self._stop: int | None = None
        """The step that all stop before."""
        self._reason = 0
        if watch is not None:
            watch.looks.append(self._look)

    def ask(self, reason: int) -> bool:
        """Asks all ranks to stop for `reason`, a number above 0. False if no step will end any more. It takes no lock:
        a signal handler may call it.
        """
        self.asked = self.asked or reason
        return self._watch is None or self._watch.failure is None

    def begin(self, step: int, check: Callable[[], None], timeout_seconds: float) -> int:
        """Returns the reason if all ranks stop before `step`, or 0: then the step may begin.

        It waits for the other ranks only when one of them was asked to stop. `check` raises if one has failed;
        `TransportError` after `timeout_seconds`.
        """
        if self._watch is None and self.asked:
            self._stop, self._reason = step, self.asked
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
        """Ends the looking. Ranks that are asked to stop later need not wait for this one."""
        if self._watch is not None and self._look in self._watch.looks:
            self._watch.looks.remove(self._look)
            self._watch.submit(self._answer)

    def _look(self, store: Store) -> None:
        """Takes the next step of the agreement that is possible."""
        if self._stop is not None:
            return
        if self._limit is None:
            if self.asked:
                store.compare_set(_REASON, "", str(self.asked))
            if not store.check([_REASON]):
                return
        self._answer(store)
        keys = [_begun(rank) for rank in range(self._ranks)]
        if store.check(keys):
            furthest, reason = max(int(store.get(key)) for key in keys), int(store.get(_REASON))
            with self._changed:
                self._stop, self._reason = furthest + 1, reason
                self._changed.notify_all()

    def _answer(self, store: Store) -> None:
        """Writes once how many steps have begun, of which there will be one more at most."""
        if self._limit is None:
            with self._changed:
                self._limit = self._begun + 1
            store.set(_begun(self._rank), str(self._limit - 1))


def _begun(rank: int) -> str:
    return f"begun/{rank}"
