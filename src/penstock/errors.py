"""Every error that Penstock raises on purpose, by the part that finds it.

A message says where, what was expected, what was found, and what to do. Names in it may come from files and other
processes, so a message holds no character that would command a terminal.
"""

from collections.abc import Sequence
from difflib import get_close_matches


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(visible(part, lines=True) if isinstance(part, str) else part for part in arguments))
        self.repeats = ""
        """That this error repeats the one of another rank, in a line; empty if it does not."""


class CaptureError(PenstockError):
    """The model could not be turned into a chain of layers."""


class ProfileError(PenstockError):
    """A profile, its file or its measurement is wrong."""


class PlanError(PenstockError):
    """A plan or a cluster is wrong, or does not fit the model."""


class ScheduleError(PenstockError):
    """A schedule violates one of its rules."""


class TransportError(PenstockError):
    """A peer died, hung, or sent an unexpected message."""


class CheckpointError(PenstockError):
    """A saved state does not fit this model or plan."""


class RehearsalError(PenstockError):
    """A training in a pipeline has other numbers than the user's own loop. `rehearsal`: what was compared."""

    def __init__(self, text: str, rehearsal: object = None) -> None:
        super().__init__(text)
        self.rehearsal = rehearsal


def suggestion(name: str, known: Sequence[str]) -> str:
    """``Did you mean 'x'? `` with the nearest of `known`, or nothing; for messages."""
    nearest = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f"Did you mean {nearest[0]!r}? " if nearest else ""


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``, ``2 matches``; for messages and tables."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith(("ch", "ss")) else "s")


def visible(text: str, *, lines: bool = False) -> str:
    """`text` with every character that is not printed as its escape, such as ``\\x1b``. These are the commands of
    terminals, marks that turn the direction of text, and halves of characters. `lines`: keeps ends of lines and tabs.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    shown = [c if c.isprintable() or c in kept else c.encode("unicode_escape").decode("ascii") for c in text]
    return "".join(shown)
