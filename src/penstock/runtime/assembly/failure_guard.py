"""Around every call of a user: an error on one process reaches the others, and ends the pipeline."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import PenstockError
from penstock.runtime.transport.worlds import World

__all__ = ["FailureGuard"]


class FailureGuard:
    """Guards the pipeline of `world`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._failed = ""
        """By what the pipeline failed, and where."""
        self.call: tuple[str, float, int] = "", time.perf_counter(), threading.get_ident()
        """Where the pipeline is called now, empty if it is not; since when; and the thread that called it last."""

    @property
    def failed(self) -> bool:
        """Whether the pipeline has failed."""
        return bool(self._failed)

    @contextmanager
    def __call__(self, place: str, harmless: bool = False) -> Iterator[None]:
        """Reports an error in this block to the other processes. The pipeline is of no use after it.

        A `harmless` error leaves a pipeline in a single process as it was. `PenstockError` if it has failed before.
        """
        if self._failed:
            raise PenstockError(
                f"this pipeline failed before ({self._failed}) and its microbatches in flight are lost: build a new "
                "Pipeline and load a state dict"
            )
        before = self.call[0]
        self.call = place, time.perf_counter(), threading.get_ident()
        try:
            yield
        except BaseException as error:
            if not harmless or self._world.processes > 1:
                self._failed = f"{type(error).__name__} {place}"
            self._world.report(place, error)
            raise
        finally:
            self.call = before, time.perf_counter(), threading.get_ident()
