"""What a pipeline has opened, closed also where the pipeline is dropped without a call of `close`.

Threads of the transport and hooks on the process would otherwise keep descriptors, communicators and memory for as long
as the process lives.
"""

import atexit
import os
import queue
import threading
import weakref
from contextlib import ExitStack, suppress
from functools import cache

from penstock.runtime.devices.process_hooks import hooks_allowed
from penstock.runtime.transport.worlds import World

_FINISH_SECONDS = 120.0
"""Longer than closing takes, where each wait has a limit of its own."""


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
    """What is to be closed by a thread of this process."""

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
