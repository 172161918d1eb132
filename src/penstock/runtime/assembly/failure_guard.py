"""Around every call of a user: an error on one process reaches the others, and ends the pipeline.

A refusal changes nothing: the call did not begin. If all processes refuse a call, all can go on.

A pipeline that is dropped without a call of `close` is closed, too. Threads of the transport and hooks on the process
would otherwise keep descriptors, communicators and memory for as long as the process lives.
"""

import atexit
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, wraps
from typing import Any, TypeVar

from penstock.errors import PenstockError
from penstock.runtime.devices.process_hooks import hooks_allowed
from penstock.runtime.transport.worlds import World
from penstock.scheduling.schedules import Schedule

C = TypeVar("C")

_FINISH_SECONDS = 120.0
"""Longer than closing takes, where each wait has a limit of its own."""

_COLLECTIVE = """step drain evaluate predict averages timeline stragglers replan state_dict load_state_dict save load
    save_weights full_state_dict close"""


def collective(pipeline: type[C]) -> type[C]:
    """Notes the calls of methods that all ranks must make, for the errors of a rank that waits in one for ranks that do
    not make it.
    """
    for name in _COLLECTIVE.split():
        setattr(pipeline, name, _noted(getattr(pipeline, name)))
    return pipeline


def _noted(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def noted(pipe: Any, *arguments: Any, **options: Any) -> Any:
        watch = pipe._guarded.watch
        if watch is None or watch.call:
            return method(pipe, *arguments, **options)
        watch.call = f"{method.__name__}()"
        try:
            return method(pipe, *arguments, **options)
        finally:
            watch.call, watch.done = "", f"after step {pipe.steps}"

    return noted


class FailureGuard:
    def __init__(self, world: World) -> None:
        self._world = world
        self._process = os.getpid()
        self._failed = ""
        """By what the pipeline failed, and where."""
        self._running = threading.Lock()
        """Held while a call uses the stages."""
        self._place = ""
        """What that call does."""
        self.closed = False
        """Whether the pipeline was closed."""
        self._discard: Callable[[], bool] | None = None
        self._repairs = True
        """Whether a new state repairs a pipeline whose stages have made different updates."""
        self._lost_state = False
        """Whether the pipeline failed in a way that a new state repairs."""
        self.all_refuse: Callable[[str], bool] | None = None
        """Called with the reason on every process that refuses a call. Returns whether all of them do."""
        self.call: tuple[str, float, int] = "", time.perf_counter(), threading.get_ident()
        """Where the pipeline is called now, empty if it is not; since when; and the thread that called it last."""
        self.watch = world.watch

    @property
    def failed(self) -> bool:
        return bool(self._failed)

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that is a rank, and has copies of its connections to other ranks."""
        return self._world.processes > 1 and os.getpid() != self._process

    @contextmanager
    def closing(self, opened: ExitStack, hint: Callable[[], object]) -> Iterator[bool]:
        """Around a drain before the pipeline is closed: whether to drain. Then gives the `hint`, unless the pipeline
        has failed, and closes what is `opened`. In a child that was forked it does nothing.
        """
        if self.forked:
            yield False
            return
        ends = not (self.closed or self.failed)
        try:
            yield ends and sys.exc_info()[0] is None
        finally:
            if ends:
                hint()
            self.closed = True
            opened.close()

    @contextmanager
    def __call__(self, place: str, harmless: bool = False) -> Iterator[None]:
        """Reports an error in this block to the other processes. The pipeline is of no use after it.

        A `harmless` block uses no stage. The pipeline stays as it was if all processes raise a `PenstockError` in it,
        or any error if there is one process. `PenstockError` if the pipeline has failed or was closed before, or is
        used by another call.
        """
        self.check_open()
        if not harmless and not self._running.acquire(blocking=False):
            self._refuse_second()
        self._world.enter(place)
        before = self.call[0]
        self.call = place, time.perf_counter(), threading.get_ident()
        try:
            if not harmless:
                self._place = place
            yield
        except BaseException as error:
            # A failure within a call of this block was reported there.
            if not self._failed and not (harmless and self._is_refusal(error)):
                if not self._recovers(error):
                    self._failed = f"{type(error).__name__} {place}"
                self._world.report(place, error)
            raise
        finally:
            self.call = before, time.perf_counter(), threading.get_ident()
            self._world.enter("")
            if not harmless:
                self._running.release()

    def run(self, place: str, work: Callable[[], object]) -> None:
        """Calls `work` in such a block."""
        with self(place):
            work()

    def check_open(self) -> None:
        """Raises `PenstockError` if the pipeline has failed, was closed, is used by another call, or is a copy in a
        child.
        """
        if self.forked:
            raise PenstockError(
                f"process {os.getpid()} was forked by rank {self._world.rank} (process {self._process}) after the "
                "pipeline was built: expected calls in that process only, since it is the one that the other ranks are "
                "connected to. Make the call there, and give the child what it needs, such as copies of weights"
            )
        if self._lost_state and self._failed:
            raise PenstockError(
                f"this pipeline failed before ({self._failed}), when some stages had made an update that others had "
                "not, or microbatches were in flight: its weights are those of no step. Call load(...) or "
                "load_state_dict(...), after which it can go on"
            )
        if self._failed:
            raise PenstockError(
                f"this pipeline failed before ({self._failed}), and its messages and microbatches in flight are lost. "
                "Its parameters() are still the newest weights of this process. Close it, build a new Pipeline and "
                "load a checkpoint: in the same processes, or after a new start"
            )
        if self.closed:
            raise PenstockError(
                "this pipeline was closed: expected calls before close() only, or inside of its with block. Close it "
                "after the last call, or build a new Pipeline and load a state dict"
            )
        if self._running.locked():
            self._refuse_second()

    def undo_with(self, discard: Callable[[], bool], schedule: Schedule) -> None:
        """After an error in a single process calls `discard`, which drops what the call has left behind, and returns
        whether the pipeline, which runs `schedule`, is as it was before the call.
        """
        if self._world.processes == 1:
            self._discard = discard
        # Stages that share weights find their versions in each other's slots.
        self._repairs = schedule.flushes or not schedule.ties

    @contextmanager
    def loading(self, drain: Callable[[], None]) -> Iterator[None]:
        """Calls `drain`, and then runs a block that gives the pipeline a new state. A pipeline that has only lost its
        state by a failure has nothing in flight, and can go on afterwards.
        """
        lost = self._failed if self._lost_state else ""
        if lost:
            self._failed = ""
        try:
            drain()
            yield
        except BaseException:
            self._failed = self._failed or lost
            raise
        self._lost_state = False

    def _recovers(self, error: BaseException) -> bool:
        """Whether the pipeline can go on after `error` in a call. Says so in a note."""
        if self._discard is None:
            return False
        intact = self._discard()
        self._lost_state = self._repairs and not intact
        if intact:
            error.add_note("penstock: this call has changed no weight, and the pipeline can go on")
        return intact

    def _refuse_second(self) -> None:
        raise PenstockError(
            f"this pipeline is already in use ({self._place}): expected one call at a time, found a call from another "
            "thread, or from the model, the loss function or a hook within a call. Make it when that call has returned"
        )

    def _is_refusal(self, error: BaseException) -> bool:
        """Whether all processes go on after `error`."""
        if self._world.processes == 1:
            return True
        return self.all_refuse is not None and isinstance(error, PenstockError) and self.all_refuse(str(error))


def open_resources(owner: object, world: World) -> ExitStack:
    """Returns the stack for what `owner` opens in `world`, which it leaves at last. The stack is closed by its `close`,
    or on a thread of its own after `owner` has been collected.

    Closing delivers what was sent, which takes time, and a collection may come at any place of a program, also where it
    holds a lock. So the collection only puts the stack into a queue, which takes no lock of Python's. The process ends
    when all stacks in the queue are closed. What is collected later is not: the transport ends itself then.
    """
    opened = ExitStack()
    opened.callback(world.leave)
    if world.processes > 1:
        finalizer = weakref.finalize(owner, _drop, _dropped(os.getpid()), opened)
        finalizer.atexit = False
    return opened


class _Dropped:
    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[ExitStack | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_close_all, args=(self.waiting,), name="penstock close", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits until all are closed. A thread that were still closing would abort the end of the process."""
        self.waiting.put(None)
        self._thread.join(_FINISH_SECONDS)


@cache
def _dropped(process: int) -> _Dropped:
    """What the `process` has dropped. A child that was forked closes nothing of its parent's."""
    return _Dropped()


def _drop(dropped: _Dropped, opened: ExitStack) -> None:
    dropped.waiting.put(opened)
    if not hooks_allowed():
        return
    # Last registered, so that it comes before the exit handlers of transports, which may be those in the queue.
    atexit.unregister(dropped.finish)
    atexit.register(dropped.finish)


def _close_all(waiting: "queue.SimpleQueue[ExitStack | None]") -> None:
    while (opened := waiting.get()) is not None:
        # The pipeline that could raise it is gone.
        with suppress(Exception):
            opened.close()
        del opened
