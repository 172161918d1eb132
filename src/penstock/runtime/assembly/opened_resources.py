"""What a pipeline has opened, closed also where the pipeline is dropped without a call of `close`.

Threads of the transport and hooks on the process would otherwise keep descriptors, communicators and memory for as long
as the process lives.
"""

import os
import queue
import threading
import weakref
from contextlib import ExitStack, suppress
from functools import cache

from penstock.runtime.transport.worlds import World

__all__ = ["open_resources"]


def open_resources(owner: object, world: World) -> ExitStack:
    """Returns the stack for what `owner` opens in `world`, which it leaves at last. The stack is closed by its `close`,
    or on a thread of its own after `owner` has been collected.

    Closing delivers what was sent, which takes time, and a collection may come at any place of a program, also where it
    holds a lock. So the collection only puts the stack into a queue, which takes no lock of Python's. At the end of the
    process nothing is done: the transport ends itself then.
    """
    opened = ExitStack()
    opened.callback(world.leave)
    if world.processes > 1:
        finalizer = weakref.finalize(owner, _dropped(os.getpid()).put, opened)
        finalizer.atexit = False
    return opened


@cache
def _dropped(process: int) -> queue.SimpleQueue[ExitStack]:
    """The queue of what is to be closed by a thread of the `process`. A child that was forked closes nothing of its
    parent's.
    """
    waiting: queue.SimpleQueue[ExitStack] = queue.SimpleQueue()
    threading.Thread(target=_close_all, args=(waiting,), name="penstock close", daemon=True).start()
    return waiting


def _close_all(waiting: queue.SimpleQueue[ExitStack]) -> None:
    while True:
        opened = waiting.get()
        # The pipeline that could raise it is gone.
        with suppress(Exception):
            opened.close()
        del opened
