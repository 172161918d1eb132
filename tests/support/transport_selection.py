"""Selects the transport between the processes of a test: shared memory or Gloo."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.runtime.transport.backend_selection import SHARED_MEMORY


@contextmanager
def sharing_memory(shared: bool) -> Iterator[None]:
    """Sends messages through shared memory or, if not `shared`, over Gloo, as between hosts."""
    before = os.environ.get(SHARED_MEMORY)
    os.environ[SHARED_MEMORY] = "1" if shared else "0"
    try:
        yield
    finally:
        del os.environ[SHARED_MEMORY]
        if before is not None:
            os.environ[SHARED_MEMORY] = before
