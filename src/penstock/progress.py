"""What only a terminal gets: progress, and colors. What only one rank says.

Files, pipes and the logs of continuous integration get no progress and no colors.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import getLogger
from threading import Event, Thread
from time import monotonic
from typing import TextIO, TypeVar

from penstock.errors import visible

Item = TypeVar("Item")

_BAR = 24


def is_interactive(stream: TextIO) -> bool:
    """Whether `stream` is a terminal, outside continuous integration."""
    return stream.isatty() and not os.environ.get("CI")


def colored(text: str, color: str, stream: TextIO) -> str:
    """`text` for `stream` in `color`, the numbers of an ANSI sequence; as it is without a terminal or with NO_COLOR."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if plain else f"\x1b[{color}m{text}\x1b[0m"


def is_first() -> bool:
    """Whether this process tells what is the same on every rank."""
    return os.environ.get("RANK", "0") == "0"


def warn_once(text: str, *values: object) -> None:
    """Logs the warning `text` of what is so on every rank, on one of them."""
    if is_first():
        getLogger("penstock").warning(text, *values)


@contextmanager
def elapsed_line(title: str, after_seconds: float = 2.0) -> Iterator[None]:
    """If its body takes longer than `after_seconds`, a line on stderr shows the seconds so far; it is erased then.

    For work whose end cannot be foreseen. Nothing is written unless stderr `is_interactive`, and by rank 0 only.
    """
    stream, ended = sys.stderr, Event()
    if not (is_interactive(stream) and is_first()):
        yield
        return

    def show() -> None:
        start, wait = monotonic(), after_seconds
        while not ended.wait(wait):
            stream.write(f"\r{title} {monotonic() - start:.0f} s")
            stream.flush()
            wait = 1.0

    thread = Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        stream.write("\r\x1b[K")
        stream.flush()


def progress_line(
    items: Sequence[Item], label: Callable[[Item], str], title: str, show: bool | None = None
) -> Iterator[Item]:
    """Yields `items`, while a line on stderr shows how many are done and the label of the current one; erases it then.

    `show`: True always writes the line, False never, None if stderr `is_interactive`.
    """
    stream = sys.stderr
    if not (is_interactive(stream) if show is None else show):
        yield from items
        return
    width = 0
    try:
        for done, item in enumerate(items):
            filled = _BAR * done // len(items)
            line = f"{title} [{'#' * filled}{'.' * (_BAR - filled)}] {done}/{len(items)} {visible(label(item))}"
            stream.write("\r" + line.ljust(width))
            stream.flush()
            width = len(line)
            yield item
    finally:
        stream.write("\r" + " " * width + "\r")
        stream.flush()
