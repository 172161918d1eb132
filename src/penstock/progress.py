"""A progress line on the terminal.

It needs no library, and writes nothing into files, pipes or the logs of continuous integration.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeVar

from penstock.errors import visible

Item = TypeVar("Item")

_BAR = 24


def is_interactive(stream: TextIO) -> bool:
    """Whether `stream` is a terminal, outside continuous integration."""
    return stream.isatty() and not os.environ.get("CI")


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
