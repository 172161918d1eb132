"""Faults on purpose: a rank is killed, stopped, slowed down or signalled, or raises, at an exact place.

    from penstock.testing import faults

    with faults.inject([faults.Kill(rank=1, step=3, action="2B0"), faults.Slow(rank=0, seconds=0.1)]):
        train()

A script that must not be changed reads them from the environment variable ``PENSTOCK_FAULTS`` when it builds its
pipeline: ``PENSTOCK_FAULTS="kill rank=1 step=3 action=2B0; slow rank=0 seconds=0.1"``. docs/reliability.md has more.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch.distributed as dist

from penstock.errors import PenstockError
from penstock.runtime.batches.results import BatchRun
from penstock.runtime.engine.worker import ACTION_HOOKS
from penstock.scheduling.actions import Action
from penstock.testing.fault_values import (
    FAULTS,
    KINDS,
    Fault,
    InjectedError,
    Kill,
    Raise,
    Signal,
    Slow,
    Stop,
    parse_faults,
)

__all__ = [
    "FAULTS",
    "Fault",
    "InjectedError",
    "Injection",
    "Kill",
    "Raise",
    "Signal",
    "Slow",
    "Stop",
    "inject",
    "inject_here",
    "parse_faults",
]

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""The environment variable in which torchrun says how often it has started the job again."""
# Changes of files are seen by Python's audit hooks. So a save has no places of its own for faults, and every moment of
# it can be hit.
_CHANGES = {"open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Injection:
    """Faults that may happen between `begin` and `end`."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._waiting = dict(enumerate(faults))
        """Those that may still happen."""
        self._changes = dict.fromkeys(self._waiting, 0)
        """How many changes of its files each fault has seen."""

    @property
    def left(self) -> list[Fault]:
        """The faults that have not happened yet, and those that happen again and again."""
        return list(self._waiting.values())

    def begin(self) -> None:
        """Begins to look."""
        ACTION_HOOKS.append(self._before_action)
        if any(fault.path is not None for fault in self.left):
            _see_changes()
            _watching.append(self)

    def end(self) -> None:
        """Looks no more."""
        ACTION_HOOKS.remove(self._before_action)
        if self in _watching:
            _watching.remove(self)

    def before_change(self, paths: Sequence[str]) -> None:
        """Has the faults happen that are due before a change of the file `paths[0]`, or from it to another one."""
        for number, fault in tuple(self._waiting.items()):
            if fault.path is None or not any(fault.path in path for path in paths) or not _is_here(fault.rank, 0):
                continue
            seen = self._changes[number]
            self._changes[number] += 1
            if seen == fault.change or (fault.lasting and seen > fault.change):
                self._happen(number, f"rank {fault.rank}, change {seen} of files at {fault.path!r} ({paths[0]})")

    def _before_action(self, rank: int, batch: BatchRun, action: Action) -> None:
        for number, fault in tuple(self._waiting.items()):
            if _is_here(fault.rank, rank) and fault.fits(batch.step, action, batch.microbatches):
                self._happen(number, f"rank {fault.rank}, step {batch.step}, action {action}")

    def _happen(self, number: int, place: str) -> None:
        fault = self._waiting[number] if self._waiting[number].lasting else self._waiting.pop(number)
        fault.happen(place)


@contextmanager
def inject(faults: Sequence[Fault]) -> Iterator[Injection]:
    """Has `faults` happen in this process in the ``with`` block, those that are of its rank and of this run of the job.

    Yields an `Injection`, whose ``left`` are those that have not happened.
    """
    for fault in faults:
        if type(fault) not in KINDS.values():
            raise PenstockError(f"inject: expected faults such as Kill(rank=1, step=3), found {fault!r}")
    run = int(os.environ.get(_RESTARTS, "0"))
    injection = Injection([fault for fault in faults if fault.restart in (None, run)])
    injection.begin()
    try:
        yield injection
    finally:
        injection.end()


def inject_here() -> None:
    """Has the faults of the environment variable happen in this process, from now to its end. Does nothing without
    the variable, and at a second call.
    """
    if text := os.environ.get(FAULTS, ""):
        _inject_to_the_end(text)


@cache
def _inject_to_the_end(text: str) -> AbstractContextManager[Injection]:
    injected = inject(parse_faults(text))
    injected.__enter__()
    return injected


_watching: list[Injection] = []
"""The injections that look at changes of files."""


@cache
def _see_changes() -> None:
    """Adds an audit hook, which Python cannot remove. It does nothing while no injection looks at changes of files."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching or event not in _CHANGES:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
        return
    paths = [os.fsdecode(one) for one in arguments[:2] if isinstance(one, str | bytes | os.PathLike)]
    for injection in tuple(_watching):
        injection.before_change(paths)


def _is_here(rank: int, own: int) -> bool:
    """Whether `rank` is the rank of this process; in a single process, whether it is `own`."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return rank == dist.get_rank()
    return rank == own
