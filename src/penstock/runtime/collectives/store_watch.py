"""The one thread of a process that calls the store at which the processes have met.

A call of a store blocks until the server of the store has answered. If the process of the server stands still, that is
never, and the call cannot be interrupted. So the other threads do not call the store: they ask this thread, and stop
waiting for its answer when they like. In between, the thread looks in the store for a failure of another rank, and
writes a sign of life of its own, with what this rank does.

On one host the operating system knows more of a rank: whether its process is stopped or has ended, also where a child
of it keeps its connections open.

Invariants of this file:
  1. The thread has a connection of its own, and makes no call that waits for another rank.
  2. After an error of the connection the store is not called again: its process has ended, and torch prints a long
     warning at every call.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

from penstock.process_states import ProcessIdentity, ProcessState
from penstock.runtime.files.plain_values import decode_plain, encode_plain

T = TypeVar("T")

FAILURE = "failure"
"""The key of the first failure of a run."""
READERS = "failure-readers"
"""The key of the number of ranks that have read it."""
_LOOK_SECONDS = 0.25
"""How often the thread looks for a failure."""
_LIFE_SECONDS = 1.0
"""How often it writes a sign of life."""
_STILL_SECONDS = 3.0
"""Without a new sign of life for this long, a rank stands still."""
_JOIN_SECONDS = 1.0
"""How long a call of the store may take that is under way when the thread is to end."""


class StoreUnreachable(RuntimeError):
    """The store has not answered in time, or its process has ended."""


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank as its last sign of life shows it."""

    beat: float
    """Differs from sign to sign."""
    place: str
    """Where its main thread was: in a step, in a save."""
    place_seconds: float
    """For how long, when it wrote this."""
    left: bool
    """Whether it takes part no longer: it closed its pipeline, or its script ended."""
    done: str
    """How far it came: after step 4."""
    begun: tuple[int, str] = 0, ""
    """How many calls of the pipeline that all ranks must make it has begun, and the method of the last one."""
    seen: float = 0.0
    """When this process saw this sign first, by its own clock."""

    def fields(self) -> dict[str, Any]:
        """What a rank writes of itself, as a plain value."""
        return {name: value for name, value in asdict(self).items() if name != "seen"}

    @classmethod
    def read(cls, fields: Mapping[str, Any], before: "RankState | None") -> "RankState":
        """The state that a rank wrote. `before`: the state at the last look."""
        known = before is not None and before.beat == fields["beat"]
        return cls(**fields, seen=before.seen if before is not None and known else time.monotonic())

    def describe(self, process: ProcessIdentity | None) -> str:
        """What the rank does, as the end of a sentence about it. `process`: its process, if that is known."""
        silent = time.monotonic() - self.seen
        place = self.place or "outside the pipeline"
        last = f"its last sign of life came {silent:.1f} s ago, {place}"
        if self.left:
            return "has left: it closed its pipeline, or its script has ended"
        state = ProcessState.UNKNOWN if process is None else process.state()
        if state is ProcessState.GONE:
            return "was killed (out of memory?) or crashed: its process has ended"
        if state is ProcessState.STOPPED:
            return f"stands still: its process is stopped (SIGSTOP, a debugger?), {last}"
        if silent > _STILL_SECONDS:
            return f"stands still, or its host does: {last}"
        return f"is at work, {place} for {self.place_seconds + silent:.1f} s"


class StoreWatch:
    """Calls `store` for `rank`. It ends with `stop`, or when the process does."""

    def __init__(self, store: Store, rank: int) -> None:
        self.failure: dict[str, Any] | None = None
        """The record of the first failure of a run, as this process knows it."""
        self.doing = "", time.monotonic()
        """Where the main thread is, and since when; it is written with the signs of life."""
        self.call = ""
        """The method of the pipeline that the main thread is in and all ranks must call; empty outside."""
        self.begun = 0, ""
        """The number of such calls so far, and the method of the last one; written with the signs of life."""
        self.done = "before the first step"
        """How far this rank came in such calls; it is written with the signs of life."""
        self.left = False
        """Whether this rank takes part no longer; it is written with the signs of life."""
        self.lost = False
        """Whether the process of the store has ended."""
        self.last: Callable[[Store], None] | None = None
        """The last call before the thread ends in good order."""
        self.states: dict[int, RankState] = {}
        """The ranks that `observe` names, as they were when the thread looked last."""
        self.looks: list[Callable[[Store], None]] = []
        """What the thread calls, with the store, whenever it looks for a failure."""
        self._answered = time.monotonic()
        self._store, self._rank = store, rank
        self._observed: tuple[int, ...] = ()
        self._requests: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="penstock store", daemon=True)
        self._thread.start()

    @property
    def silent_seconds(self) -> float:
        """How long the store has not answered; 0 if no answer is due."""
        silent = time.monotonic() - self._answered
        return silent if silent > 2 * _LOOK_SECONDS else 0.0

    def submit(self, call: Callable[[Store], T]) -> "Future[T]":
        """Has the thread run ``call(store)``, after all that it was asked for before. Does not block."""
        future: Future[T] = Future()
        if self.lost or not self._thread.is_alive():
            future.set_exception(StoreUnreachable("the process of the store has ended"))
        else:
            self._requests.put((call, future))
        return future

    def ask(self, call: Callable[[Store], T], seconds: float) -> T:
        """Returns ``call(store)``. `StoreUnreachable` if there is no answer within `seconds`, or the store is lost."""
        deadline = time.monotonic() + seconds
        future = self.submit(call)
        while True:
            try:
                return future.result(max(0.0, min(deadline - time.monotonic(), _LOOK_SECONDS)))
            except TimeoutError:
                if not self._thread.is_alive() and not future.done():
                    raise StoreUnreachable("the process of the store has ended") from None
                if time.monotonic() > deadline:
                    raise StoreUnreachable(f"the store has not answered for {seconds:g} s") from None

    def look(self, seconds: float) -> None:
        """Looks for a failure now instead of soon; waits at most `seconds` for the store."""
        with suppress(StoreUnreachable):
            self.ask(self._look, seconds)

    def observe(self, ranks: Sequence[int]) -> None:
        """Has the thread read the states of `ranks` from now on, whenever it looks for a failure."""
        self._observed = tuple(ranks)

    def show(self, seconds: float) -> None:
        """Writes a sign of life now instead of soon; waits at most `seconds` for the store."""
        with suppress(StoreUnreachable):
            self.ask(self._live, seconds)

    def stop(self) -> None:
        """Ends the thread. A thread that the store does not answer stays, and ends with the process."""
        self._requests.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            store = _connected_anew(self._store)
            look = life = 0.0
            shown = self.doing
            while True:
                now = time.monotonic()
                if now >= look:
                    if now >= life or self.doing != shown:
                        shown, life = self.doing, now + _LIFE_SECONDS
                        self._live(store)
                    self._look(store)
                    look = now + _LOOK_SECONDS
                self._answered = time.monotonic()
                with suppress(queue.Empty):
                    request = self._requests.get(timeout=max(0.0, look - self._answered))
                    if request is None:
                        if self.last is not None:
                            self.last(store)
                        break
                    self._answer(store, *request)
        except Exception:
            # A store that holds what no rank of Penstock writes is as good as none.
            self.lost = True
        with suppress(queue.Empty):
            while True:
                left = self._requests.get_nowait()
                if left is not None:
                    left[1].set_exception(StoreUnreachable("the process of the store has ended"))

    def _answer(self, store: Store, call: Callable[[Store], Any], future: "Future[Any]") -> None:
        try:
            future.set_result(call(store))
        except RuntimeError as error:
            self.lost = True
            future.set_exception(StoreUnreachable(str(error)))
            raise
        except Exception as error:
            future.set_exception(error)

    def _live(self, store: Store) -> None:
        place, since = self.doing
        state = RankState(
            time.monotonic(), place, time.monotonic() - since, self.left, done=self.done, begun=self.begun
        )
        store.set(_state_key(self._rank), encode_plain(state.fields()).decode())

    def _look(self, store: Store) -> None:
        if self.failure is None and store.check([FAILURE]):
            self.failure = decode_plain(store.get(FAILURE))
            if self.failure["rank"] != self._rank:
                store.add(READERS, 1)
        for look in tuple(self.looks):
            look(store)
        for rank in self._observed:
            if store.check([_state_key(rank)]):
                state = decode_plain(store.get(_state_key(rank)))
                self.states[rank] = RankState.read(state, self.states.get(rank))


def _connected_anew(store: Store) -> Store:
    """A connection of its own to `store`. Calls of one connection wait for each other."""
    clone: Callable[[], Store] | None = getattr(store, "clone", None)
    try:
        return store if clone is None else clone()
    except RuntimeError:
        # A store of the user's own need not implement it.
        return store


def _state_key(rank: int) -> str:
    return f"state/{rank}"
