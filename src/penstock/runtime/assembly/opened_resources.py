"""What a pipeline has opened, closed also where the pipeline is dropped without a call of `close`.

Threads of the transport and hooks on the process would otherwise keep descriptors, communicators and memory for as long
as the process lives.
"""

import _thread
import os
import weakref
from contextlib import ExitStack, suppress

__all__ = ["close_when_collected"]


def close_when_collected(owner: object, opened: ExitStack) -> None:
    """Closes `opened` on a thread of its own after `owner` has been collected.

    Closing delivers what was sent, which takes time, and a collection may come at any place of a program, also where it
    holds a lock. At the end of the process nothing is done: the transport ends itself then.
    """
    finalizer = weakref.finalize(owner, _close_beside, opened, os.getpid())
    finalizer.atexit = False


def _close_beside(opened: ExitStack, process: int) -> None:
    # What a child inherited by a fork is its parent's.
    if os.getpid() == process:
        # A `threading.Thread` takes locks when it starts, which the interrupted code may hold. The interpreter starts
        # no thread when it shuts down.
        with suppress(RuntimeError):
            _thread.start_new_thread(_close, (opened,))


def _close(opened: ExitStack) -> None:
    # The pipeline that could raise it is gone.
    with suppress(Exception):
        opened.close()
