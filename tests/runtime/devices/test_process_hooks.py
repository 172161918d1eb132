"""What Penstock changes in its process, and that one variable forbids it."""

import atexit
import os
import sys
from dataclasses import dataclass

import pytest

import penstock
from penstock.errors import TransportError
from penstock.runtime.devices.local_devices import CONNECTIONS
from penstock.runtime.devices.process_hooks import PROCESS_HOOKS
from support.processes import Pool
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
    case, kept = Case("layered", "1f1b-flush", 2, 4), dict(os.environ)
    with penstock.Pipeline(case.build(), **case.options) as first:
        # Libraries that PyTorch imports now register functions of their own.
        first.step(*case.batches[0])
    os.environ.pop(CONNECTIONS, None)
    os.environ[PROCESS_HOOKS] = allowed
    before, hook, functions = dict(os.environ), sys.excepthook, atexit._ncallbacks()

    def changes() -> Changes:
        environment = {name: value for name, value in os.environ.items() if before.get(name) != value}
        return Changes(environment, sys.excepthook is not hook, atexit._ncallbacks() - functions)

    try:
        with penstock.Pipeline(case.build(), **case.options) as pipe:
            losses = [float(pipe.step(*batch).loss) for batch in case.batches]
            during = changes()
        return during, changes(), losses
    finally:
        os.environ.clear()
        os.environ.update(kept)


def test_hooks_are_set_while_a_pipeline_is_open(pool: Pool) -> None:
    connections = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    for during, after, _ in pool.run(2, observe_changes, "1"):
        assert during == Changes(connections, hooked=True, exit_functions=2)
        assert (after.environment, after.hooked) == (connections, False)


def test_hooks_can_be_switched_off(pool: Pool) -> None:
    losses = [losses for _, _, losses in pool.run(2, observe_changes, "1")]
    for during, after, found in pool.run(2, observe_changes, "0"):
        assert during == after == Changes({}, hooked=False, exit_functions=0)
        assert found in losses


def test_without_hooks_the_process_group_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), (PROCESS_HOOKS, "0")):
        monkeypatch.setenv(name, value)
    case = Case("layered", "1f1b-flush", 2, 4)

    with pytest.raises(TransportError, match=r"WORLD_SIZE is 2 .* Call torch\.distributed\.init_process_group\(\)"):
        penstock.Pipeline(case.build(), **case.options)
