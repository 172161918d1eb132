"""Faults as values with a text form: what happens, to which rank, and at which action, step or change of a file."""

import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias

from penstock.errors import PenstockError, suggestion
from penstock.scheduling.actions import Action

FAULTS = "PENSTOCK_FAULTS"
"""The environment variable with the text of faults."""
ActionChoice: TypeAlias = str | Callable[[Action], bool] | None

_NUMBERED, _OTHERS = "FBIWCSRHD", "UATNGQ"
"""The kinds of actions of one microbatch, and those of a version."""
_CHOICE = re.compile(rf"(\d*)([{_NUMBERED}{_OTHERS}])(\d*)")
_ACTION = re.compile(r"(\d+)([A-Z])(\d+)")


class InjectedError(PenstockError):
    """The error of a `Raise` that names no other."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Where a fault happens: on `rank`, at the first place that fits all that is given.

    Args:
        rank: of the process; in a single process, of the pipeline.
        step: the number of the training step, from 0, over all runs of a training that was resumed. A drain counts as
            the step after it.
        action: which action it happens before: a text with any of stage, kind and microbatch of the minibatch
            (``"2B0"``, ``"2B"``, ``"B0"``, ``"B"``; kinds as in schedules, without microbatch for ``U``, ``A``, ``T``,
            ``N``, ``G`` and ``Q``), or a function of the action. None takes any.
        path, change: it happens before the change number `change` (from 0) of files whose path contains `path`:
            opening for writing, making, renaming or removing; in a save, for example. Then there is neither step nor
            action.
        restart: the run of a job that torchrun starts again: 0 (default) is the first; None is every run.

    `PenstockError` if these do not fit together.
    """

    verb: ClassVar[str] = ""
    lasting: ClassVar[bool] = False
    """Whether it happens at every place that fits, instead of once."""

    rank: int
    step: int | None = None
    action: ActionChoice = None
    path: str | None = None
    change: int = 0
    restart: int | None = 0

    def __post_init__(self) -> None:
        for name in ("rank", "step", "change", "restart", "number"):
            value = getattr(self, name, 0)
            if value is None and name in ("step", "restart"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise PenstockError(f"{self.verb} {name}={value!r}: expected a number from 0, found another value")
        if self.path is not None and (not self.path or self.step is not None or self.action is not None):
            raise PenstockError(
                f"{self.verb} path={self.path!r}: expected a part of a path and neither step nor action, found "
                f"step={self.step!r} and action={self.action!r}. A fault happens at an action or at a change of a file"
            )
        if self.path is None and self.change:
            raise PenstockError(
                f"{self.verb} change={self.change}: expected path= with it, a part of the paths whose changes count"
            )
        if isinstance(self.action, str):
            _check_choice(self.action)

    def __str__(self) -> str:
        """The text form, which `parse_faults` reads back."""
        given = [
            f"{one.name}={shlex.quote(_text(getattr(self, one.name)))}"
            for one in fields(self)
            if one.name == "rank" or getattr(self, one.name) != one.default
        ]
        return " ".join([self.verb, *given])

    def fits(self, step: int, action: Action, microbatches: int) -> bool:
        """Whether it happens before `action` in `step`, whose minibatch has `microbatches` microbatches."""
        if self.path is not None or self.step not in (None, step):
            return False
        if self.action is None or callable(self.action):
            return self.action is None or self.action(action)
        wanted, found = _CHOICE.fullmatch(self.action), _ACTION.match(str(action))
        assert wanted is not None, "its form was checked"
        assert found is not None, "every action has this form"
        stage, kind, number = found.groups()
        place = str(int(number) % microbatches) if kind in _NUMBERED else number
        return all(choice in ("", value) for choice, value in zip(wanted.groups(), (stage, kind, place), strict=True))

    def happen(self, place: str) -> None:
        """Does to this process what the fault is, at `place`."""
        raise AssertionError("a fault is one of its subclasses")


@dataclass(frozen=True, kw_only=True)
class Kill(Fault):
    """Ends the process by SIGKILL."""

    verb = "kill"

    def happen(self, place: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Stop(Fault):
    """Stops the process by SIGSTOP: it stands still with all its threads until it gets SIGCONT."""

    verb = "stop"

    def happen(self, place: str) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True, kw_only=True)
class Raise(Fault):
    """Raises `error`, by default an `InjectedError`: before a change of a file, an ``OSError(ENOSPC, ...)`` is a full
    disk. It has no text form if it has an `error`.
    """

    verb = "raise"
    error: BaseException | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.error is not None and not isinstance(self.error, BaseException):
            raise PenstockError(f"raise error={self.error!r}: expected an exception, such as ValueError('text')")

    def happen(self, place: str) -> None:
        raise self.error or InjectedError(
            f"{place}: expected to go on, found the fault {str(self)!r}, which penstock.testing.faults raises here on "
            f"purpose. Remove it from faults.inject(...) or from {FAULTS} to train"
        )


@dataclass(frozen=True, kw_only=True)
class Signal(Fault):
    """Sends the process the signal of that `number`, by default SIGTERM, as schedulers do before they take a machine
    away.
    """

    verb = "signal"
    number: int = signal.SIGTERM

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.number not in signal.valid_signals():
            raise PenstockError(f"signal number={self.number!r}: expected that of a signal, such as signal.SIGUSR1")

    def happen(self, place: str) -> None:
        os.kill(os.getpid(), self.number)


@dataclass(frozen=True, kw_only=True)
class Slow(Fault):
    """Sleeps for `seconds` before each action (or change) that fits."""

    verb = "slow"
    lasting = True
    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.seconds, int | float) or not 0 <= self.seconds < float("inf"):
            raise PenstockError(f"slow seconds={self.seconds!r}: expected a number of seconds from 0")

    def happen(self, place: str) -> None:
        time.sleep(self.seconds)


KINDS: dict[str, type[Fault]] = {kind.verb: kind for kind in (Kill, Raise, Signal, Slow, Stop)}


def parse_faults(text: str) -> list[Fault]:
    """The faults of a text such as ``"kill rank=1 step=3 action=2B0; slow rank=0 seconds=0.1"``.

    `PenstockError` if it cannot be read.
    """
    words: list[list[str]] = [[]]
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";")
    lexer.whitespace_split = True
    for word in lexer:
        if set(word) == {";"}:
            words.append([])
        else:
            words[-1].append(word)
    return [_parse(fault) for fault in words if fault]


def _parse(words: Sequence[str]) -> Fault:
    verb, *given = words
    if verb not in KINDS:
        raise PenstockError(
            f"{FAULTS}: expected one of {', '.join(KINDS)}, found {verb!r} in {' '.join(words)!r}. "
            f"{suggestion(verb, list(KINDS))}Write, for example, kill rank=1 step=3 action=2B0"
        )
    kind = KINDS[verb]
    readers = {"action": str, "path": str, "seconds": float}
    names = [one.name for one in fields(kind) if one.name != "error"]
    values: dict[str, Any] = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or name not in names or name in values:
            raise PenstockError(
                f"{FAULTS}: expected name=value with each of {', '.join(names)} at most once, found {word!r} in "
                f"{' '.join(words)!r}. {suggestion(name, names)}"
            )
        try:
            values[name] = None if (name, value) == ("restart", "any") else readers.get(name, int)(value)
        except ValueError as error:
            raise PenstockError(f"{FAULTS}: expected a number after {name}=, found {value!r} in {word!r}") from error
    missing = [one for one in ("rank", "seconds") if one in names and one not in values]
    if missing:
        raise PenstockError(f"{FAULTS}: expected {missing[0]}= in {' '.join(words)!r}, found none. Add it")
    return kind(**values)


def _text(value: Any) -> str:
    return "any" if value is None else str(int(value) if isinstance(value, int) else value)


def _check_choice(choice: str) -> None:
    match = _CHOICE.fullmatch(choice)
    if match is None or (match[3] and match[2] not in _NUMBERED):
        raise PenstockError(
            f"action={choice!r}: expected stage, kind and microbatch of the minibatch, as in 2B0, 2B, B0 or B, found "
            f"another form. Kinds: {', '.join(_NUMBERED)}, and without a microbatch {', '.join(_OTHERS)}"
        )
