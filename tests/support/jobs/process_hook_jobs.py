"""What a pipeline changes in its process, for `test_process_hooks.py`."""

import atexit
import os
import sys
from dataclasses import dataclass

import penstock
from penstock.runtime.devices.local_devices import CONNECTIONS
from penstock.runtime.devices.process_hooks import PROCESS_HOOKS
from support.training import Case


@dataclass(frozen=True)
class Changes:
    """What differs from the time before the pipeline was built."""

    environment: dict[str, str]
    hooked: bool
    """Whether errors that nothing catches go to another function."""
    exit_functions: int
    """Registered since, with those that were withdrawn."""


def observe_changes(allowed: str) -> tuple[Changes, Changes, list[float]]:
    """The changes while a pipeline trains and after it was closed, and its losses."""
    kept = dict(os.environ)
    os.environ.pop(CONNECTIONS, None)
    os.environ[PROCESS_HOOKS] = allowed
    before, hook, functions = dict(os.environ), sys.excepthook, atexit._ncallbacks()

    def changes() -> Changes:
        environment = {name: value for name, value in os.environ.items() if before.get(name) != value}
        return Changes(environment, sys.excepthook is not hook, atexit._ncallbacks() - functions)

    try:
        case = Case("layered", "1f1b-flush", 2, 4)
        with penstock.Pipeline(case.build(), **case.options) as pipe:
            losses = [float(pipe.step(*batch).loss) for batch in case.batches]
            during = changes()
        return during, changes(), losses
    finally:
        os.environ.clear()
        os.environ.update(kept)
